"""What one ref costs a thread block: bytes, columns, registers.

The numbers are those of Mosaic GPU's allocation (`jax._src.pallas.mosaic_gpu`:
`Resources` and `_run_scoped_resource_estimator` of `lowering`, and `_launch` of
`jax.experimental.mosaic.gpu.core`), the same in all supported releases.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from jax_mgpu_ext._src import avals
from jax_mgpu_ext._src import errors
from jax_mgpu_ext._src import spec_text
from jax_mgpu_ext._src import weak_cache

# Each ref in SMEM begins at a multiple of it (`SMEM_ALIGNMENT` of JAX).
SMEM_ALIGNMENT = 1024
# An mbarrier is 64 bits (PTX ISA, "Contents of the mbarrier object").
BARRIER_BYTES = 8
# `tcgen05.alloc` writes the address of the columns, 32 bits, to SMEM.
TMEM_ADDRESS_BYTES = 4
# Columns are asked for in chunks of 8 (`Resources.__post_init__` of JAX).
_TMEM_CHUNK = 8
# A Pallas thread is a warpgroup.
THREADS_PER_WARPGROUP = 128
# The note of a row whose barrier orders the tensor core.
ORDERS_TENSOR_CORE = "orders_tensor_core"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """One item of a budget.

  Attributes:
    path: Where its spec stands in the tree, or what the kernel's body calls it.
    kind: "smem", "union", "barrier", "cluster barrier", "tmem", "accumulator",
      "semaphore", "gmem", "member" (of a union), "reduction scratch", "tmem
      address" or "profiler".
    shape: Its shape, as the kernel's body sees it; `()` for what has none.
    dtype: Name of its type of element, empty for what has none.
    smem_bytes: Bytes of SMEM a block.
    padding_bytes: Bytes after them that only align what comes next.
    offset_bytes: Where it begins in the block's SMEM; None: it is not there. A
      barrier may trade places with another that is equal to it.
    tmem_columns: Columns of TMEM, in the chunks of 8 that are asked for.
    registers_per_thread: 32-bit registers of each CUDA thread of the warpgroup.
    in_total: Whether the totals contain it. What is allocated in scopes that
      follow each other reuses memory, and only the largest of them counts.
    note: What else there is to say, as `ORDERS_TENSOR_CORE` of a barrier.
  """

  path: str
  kind: str
  shape: tuple[int, ...] = ()
  dtype: str = ""
  smem_bytes: int = 0
  padding_bytes: int = 0
  offset_bytes: int | None = None
  tmem_columns: int = 0
  registers_per_thread: int = 0
  in_total: bool = True
  note: str = ""

  def describe(self) -> str:
    """Writes it for a message, as `specs['a'] float16[4,64,64]`."""
    if not self.dtype or "barrier" in self.kind:
      sizes = f"[{','.join(map(str, self.shape))}]" if self.shape else ""
      return f"{self.path} {self.kind}{sizes}"
    return f"{self.path} {self.dtype}[{','.join(map(str, self.shape))}]"

  def to_json(self) -> dict[str, Any]:
    """Returns the fields as plain numbers, strings and lists."""
    return {**dataclasses.asdict(self), "shape": list(self.shape)}


@dataclasses.dataclass(frozen=True, slots=True)
class Cost:
  """What a ref costs; see `Row`.

  Attributes:
    kind: As that of a row.
    smem_bytes: Of SMEM scratch, without padding.
    barrier_bytes: Of mbarriers, which come after all scratch.
    tmem_columns: In chunks.
    registers_per_thread: Of accumulators.
    collective: Whether its TMEM spans two blocks.
    barrier_key: Barriers with equal keys can stand for each other; else None.
    orders_tensor_core: Whether it is a barrier that fences tcgen05.
  """

  kind: str
  smem_bytes: int = 0
  barrier_bytes: int = 0
  tmem_columns: int = 0
  registers_per_thread: int = 0
  collective: bool = False
  barrier_key: Any = None
  orders_tensor_core: bool = False

  @property
  def padding_bytes(self) -> int:
    return align(self.smem_bytes, SMEM_ALIGNMENT) - self.smem_bytes


def align(number: int, multiple: int) -> int:
  """Returns the smallest multiple that is not less than the number."""
  return -(-number // multiple) * multiple


def tmem_allocation(columns: int) -> int:
  """Returns how many columns `tcgen05.alloc` takes for those asked for.

  A power of two from 32 on (PTX ISA, "tcgen05.alloc"); 0 for none.
  """
  return max(32, 1 << (columns - 1).bit_length()) if columns else 0


# The costs of live specs, each with the aval that it was derived from: whoever
# registers another answer for the type makes another aval, and no hit.
_costs = weak_cache.IdentityCache()


def cost_of_spec(spec: Any) -> Cost:
  """Returns what a spec, or a ref aval, costs.

  Raises:
    SpecError: It is no spec, or JAX cannot tell its size.
  """
  aval = avals.ref_aval(spec)
  known = _costs.known.get(id(spec))
  if known is not None and known[1][0] is aval and known[0]() is spec:
    return known[1][1]
  try:
    cost = cost_of_aval(aval)
  except errors.SpecError as e:
    e.spec = spec
    raise
  if aval is not spec:  # Else the entry would keep its own key alive.
    _costs.put(spec, (aval, cost))
  return cost


def cost_of_aval(aval: Any) -> Cost:
  """Returns what a ref aval costs.

  Raises:
    SpecError: JAX cannot tell its size.
  """
  aval = getattr(aval, "ref", aval)  # What is below transforms is allocated.
  try:
    return _cost(aval)
  except (
      ArithmeticError, AssertionError, AttributeError, LookupError,
      NotImplementedError, TypeError, ValueError,
  ) as e:
    raise errors.spec_error_like(type(e))(
        f"{spec_text.describe_error(e)}: JAX cannot derive the aval of"
        f" {spec_text.describe(aval)} as something to allocate",
        code="MGPU004", spec=aval,
        hint="Check the spec's shape, dtype and layout",
    ) from e


def _cost(aval: Any) -> Cost:
  # pylint: disable=g-import-not-at-top
  from jax._src import dtypes
  from jax._src.pallas import core as pallas_core
  from jax._src.pallas.mosaic_gpu import core
  # pylint: enable=g-import-not-at-top

  dtype, space = aval.dtype, aval.memory_space
  size = math.prod(aval.shape)
  if not isinstance(size, int):
    raise ValueError(f"a symbolic shape, {aval.shape}, has no size in bytes")
  if isinstance(dtype, (core.BarrierType, core.ClusterBarrierType)):
    local = isinstance(dtype, core.BarrierType)
    return Cost(
        "barrier" if local else "cluster barrier",
        barrier_bytes=BARRIER_BYTES * size,
        barrier_key=(dtype, size),
        orders_tensor_core=bool(dtype.orders_tensor_core),
    )
  is_union = isinstance(aval, core.AbstractRefUnion)
  if space == core.TMEM:
    if len(aval.shape) != 2:
      raise ValueError(f"TMEM allocations must be 2D, got {aval.shape}")
    columns = aval.shape[1]
    if not is_union:
      columns = aval.layout.cols_in_shape(
          aval.shape, dtypes.itemsize_bits(dtype)
      )
    return Cost(
        "union" if is_union else "tmem",
        tmem_columns=align(columns, _TMEM_CHUNK),
        collective=bool(aval.collective),
    )
  if dtypes.issubdtype(dtype, pallas_core.semaphore_dtype):
    return Cost("semaphore")
  bits = size * dtypes.itemsize_bits(dtype)
  if space == core.SMEM:
    return Cost("union" if is_union else "smem", smem_bytes=bits // 8)
  if space == core.REGS:
    return Cost(
        "accumulator",
        registers_per_thread=-(-bits // (32 * THREADS_PER_WARPGROUP)),
    )
  return Cost("gmem")


def rows_of(
    path: str, aval: Any, cost: Cost, offset_bytes: int | None
) -> list[Row]:
  """Returns the row of a ref, and those of a union's members below it.

  Args:
    path: Its path.
    aval: Its ref aval.
    cost: What it costs.
    offset_bytes: Where it begins in SMEM, if it is there.
  """
  in_smem = bool(cost.smem_bytes or cost.barrier_bytes) or cost.kind == "smem"
  rows = [
      Row(
          path=path,
          kind=cost.kind,
          shape=tuple(aval.shape),
          dtype=_dtype_name(aval),
          smem_bytes=cost.smem_bytes + cost.barrier_bytes,
          padding_bytes=cost.padding_bytes,
          offset_bytes=offset_bytes if in_smem else None,
          tmem_columns=cost.tmem_columns,
          registers_per_thread=cost.registers_per_thread,
          note=ORDERS_TENSOR_CORE if cost.orders_tensor_core else "",
      )
  ]
  groups = getattr(getattr(aval, "ref", aval), "refs", None)
  if cost.kind != "union" or groups is None:
    return rows
  for group_path, member, start in _members(groups):
    part = cost_of_aval(member)
    rows.append(
        Row(
            path=f"{path}.refs{group_path}",
            kind="member",
            shape=tuple(member.shape),
            dtype=_dtype_name(member),
            smem_bytes=part.smem_bytes,
            offset_bytes=(
                None
                if offset_bytes is None or not part.smem_bytes
                else offset_bytes + start
            ),
            tmem_columns=part.tmem_columns,
            in_total=False,
        )
    )
  return rows


def scratch_row(path: str, size: int, offset_bytes: int) -> Row:
  """Returns the row of what the warps of a reduction exchange values in."""
  return Row(
      path=path, kind="reduction scratch", smem_bytes=size,
      padding_bytes=align(size, SMEM_ALIGNMENT) - size,
      offset_bytes=offset_bytes,
  )


def tmem_address_row(path: str, offset_bytes: int) -> Row:
  """Returns the row of the place that `tcgen05.alloc` writes an address to."""
  return Row(
      path=path, kind="tmem address", smem_bytes=TMEM_ADDRESS_BYTES,
      offset_bytes=offset_bytes,
  )


def _members(groups: Any) -> list[tuple[str, Any, int]]:
  """Returns (path, aval, offset in bytes) of the refs in a union's groups."""
  import jax  # pylint: disable=g-import-not-at-top

  found = []
  is_ref = lambda ref: isinstance(ref, _ref_types())
  for number, group in enumerate(groups):
    start = 0
    for path, ref in jax.tree_util.tree_leaves_with_path(group, is_leaf=is_ref):
      start = align(start, SMEM_ALIGNMENT)
      found.append((f"[{number}]{jax.tree_util.keystr(path)}", ref, start))
      start += cost_of_aval(ref).smem_bytes
  return found


def _ref_types() -> tuple[type[Any], ...]:
  from jax_mgpu_ext._src import aval_table  # pylint: disable=g-import-not-at-top

  return aval_table.ref_types()


def _dtype_name(aval: Any) -> str:
  dtype = aval.dtype
  return getattr(dtype, "name", None) or str(dtype)
