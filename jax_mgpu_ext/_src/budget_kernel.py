"""The budget of a real kernel: of all that its body allocates."""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import math
from typing import Any

from jax_mgpu_ext._src import budget as budget_lib
from jax_mgpu_ext._src import budget_limits
from jax_mgpu_ext._src import budget_rows
from jax_mgpu_ext._src import kernel_calls
from jax_mgpu_ext._src import targets
from jax_mgpu_ext._src.budget_rows import Row
from jax_mgpu_ext._src.targets import Target


def budget_kernel(
    call: Any,
    target: str | Target = "h100",
    *,
    registers_per_thread: int | None = None,
) -> budget_lib.Budget:
  """Returns what a kernel takes of a GPU, with all that its body allocates.

  Scopes that follow each other reuse memory: rows of the smaller ones are not
  `in_total`. So do the branches of a `cond`, taken or not.

  Args:
    call: A kernel that `kernel_calls.find` has found, or a traced program,
      `jax.jit(f).trace(...)`, with one kernel in it.
    target: The GPU, or its name; see `targets.get`.
    registers_per_thread: Registers of the compiled kernel, for `blocks_per_sm`;
      None: not known.

  Raises:
    ValueError: The program has no kernel, or several.
    SpecError: JAX cannot tell the size of something in the body.
    TargetError: There is no such target.
  """
  target = targets.get(target)
  if not isinstance(call, kernel_calls.KernelCall):
    found = list(kernel_calls.find(call))
    if len(found) != 1:
      names = ", ".join(kernel.name for kernel in found) or "none"
      raise ValueError(
          "expected a program that calls one plgpu.kernel, got"
          f" {len(found)}: {names}. Pass one of kernel_calls(program)"
      )
    [call] = found
  counter = _Counter(call)
  use = counter.of_jaxpr(call.jaxpr, 0, call.source)
  rows = counter.placed(use)
  offset = use.smem[0] + sum(
      rows[index].smem_bytes
      for indices in use.barriers.values()
      for index in indices
  )
  threads = call.num_threads * budget_rows.THREADS_PER_WARPGROUP
  columns = use.tmem[0] + use.collective_tmem[0]
  if columns:
    rows.append(budget_rows.tmem_address_row(call.name, offset))
    offset += budget_rows.TMEM_ADDRESS_BYTES
  if space := _profiler_bytes(call.compiler_params, threads):
    start = budget_rows.align(offset, 8)
    if start != offset:  # What aligns it belongs to the item before.
      padding = start - offset
      rows[-1] = dataclasses.replace(rows[-1], padding_bytes=padding)
    rows.append(
        Row(
            path=call.name, kind="profiler", smem_bytes=space,
            offset_bytes=start,
        )
    )
    offset = start + space
  totals = budget_limits.Totals(
      offset,
      columns,
      use.registers[0],
      math.prod(call.cluster),
      threads,
      any(cost.kind == "accumulator" for cost in counter.costs),
      any(cost.orders_tensor_core for cost in counter.costs),
  )
  where = f" in kernel {call.name}"
  return budget_lib.assemble(
      target, totals, rows, counter.costs,
      grid=call.grid, registers_per_thread=registers_per_thread, where=where,
  )


# An amount, and which rows it is made of.
_Amount = tuple[int, tuple[int, ...]]
_NONE: _Amount = (0, ())


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Use:
  """What a piece of a body takes at its highest.

  Attributes:
    smem: Bytes of scratch.
    tmem: Columns for one block.
    collective_tmem: Columns that two blocks share.
    registers: Registers a thread.
    barriers: Key -> rows of barriers that cannot stand for each other.
  """

  smem: _Amount = _NONE
  tmem: _Amount = _NONE
  collective_tmem: _Amount = _NONE
  registers: _Amount = _NONE
  barriers: dict[Any, tuple[int, ...]] = dataclasses.field(default_factory=dict)

  def _combine(self, other: _Use, amount: Callable, rows: Callable) -> _Use:
    mine, theirs = self.barriers, other.barriers
    return _Use(
        smem=amount(self.smem, other.smem),
        tmem=amount(self.tmem, other.tmem),
        collective_tmem=amount(self.collective_tmem, other.collective_tmem),
        registers=amount(self.registers, other.registers),
        barriers={
            key: rows(mine.get(key, ()), theirs.get(key, ()))
            for key in {**mine, **theirs}
        },
    )

  def together(self, other: _Use) -> _Use:
    """Both at once."""
    return self._combine(
        other, lambda a, b: (a[0] + b[0], a[1] + b[1]), lambda a, b: a + b
    )

  def either(self, other: _Use) -> _Use:
    """One after the other, or one of them."""
    return self._combine(
        other,
        lambda a, b: b if b[0] > a[0] else a,
        lambda a, b: b if len(b) > len(a) else a,
    )


class _Counter:
  """Goes through a body, and remembers the rows.

  Attributes:
    rows: All rows, in the order of the program; barriers without their place.
    costs: Those of all refs.
  """

  def __init__(self, call: kernel_calls.KernelCall):
    self._call = call
    self.rows: list[Row] = []
    self.costs: list[budget_rows.Cost] = []

  def of_jaxpr(self, jaxpr: Any, offset: int, source: str) -> _Use:
    """Returns what a jaxpr uses if scratch from `offset` on is free."""
    use = _Use()
    for eqn in jaxpr.eqns:
      at = kernel_calls.source_of(eqn, source)
      use = use.either(self._of_eqn(eqn, offset, at))
    return use

  def _of_eqn(self, eqn: Any, offset: int, source: str) -> _Use:
    if kernel_calls.is_run_scoped(eqn):
      use = self._of_refs(eqn, offset, source)
      free = offset + use.smem[0]
      return use.together(self.of_jaxpr(eqn.params["jaxpr"], free, source))
    use = self._of_reduction(eqn, offset, source)
    for inner in kernel_calls.inner_jaxprs(eqn):
      use = use.either(self.of_jaxpr(inner, offset, source))
    return use

  def _of_refs(self, eqn: Any, offset: int, source: str) -> _Use:
    use = _Use()
    for path, aval in kernel_calls.allocations(eqn, source):
      cost = budget_rows.cost_of_aval(aval)
      size = cost.smem_bytes + cost.padding_bytes
      index = (len(self.rows),)
      amounts = dict(
          smem=size,
          registers=cost.registers_per_thread,
          tmem=0 if cost.collective else cost.tmem_columns,
          collective_tmem=cost.tmem_columns if cost.collective else 0,
      )
      key = cost.barrier_key
      own = _Use(
          **{k: (v, index) if v else _NONE for k, v in amounts.items()},
          barriers={} if key is None else {key: index},
      )
      self.rows += budget_rows.rows_of(path, aval, cost, offset)
      self.costs.append(cost)
      offset += size
      use = use.together(own)
    return use

  def _of_reduction(self, eqn: Any, offset: int, source: str) -> _Use:
    """Returns what an equation takes by itself.

    Which primitives are reductions that may need scratch differs between the
    releases, so JAX's own table is asked.
    """
    from jax._src.pallas.mosaic_gpu import lowering  # pylint: disable=g-import-not-at-top

    # pylint: disable=protected-access
    rule = lowering._resource_estimators.get(eqn.primitive)
    if rule is None or any(kernel_calls.inner_jaxprs(eqn)):
      return _Use()
    params, mesh = self._call.compiler_params, self._call.mesh
    context = lowering.ResourceEstimatorContext(
        reduction_scratch_bytes=params.reduction_scratch_bytes,
        axis_names=lowering._AxisNames(
            mesh.grid_names, mesh.cluster_names, mesh.thread_name
        ).reverse(),
        lowering_semantics=params.lowering_semantics,
    )
    # pylint: enable=protected-access
    found = rule(context, *(var.aval for var in eqn.invars), **eqn.params)
    if not found.smem_scratch_bytes:
      return _Use()
    path = " at ".join(filter(None, (eqn.primitive.name, source)))
    index = (len(self.rows),)
    # JAX has rounded up what it was told; the rest of it is padding.
    size = min(params.reduction_scratch_bytes, found.smem_scratch_bytes)
    self.rows.append(budget_rows.scratch_row(path, size, offset))
    return _Use(smem=(found.smem_scratch_bytes, index))

  def placed(self, use: _Use) -> list[Row]:
    """Returns the rows, and which of them the totals are made of."""
    total = {
        index
        for _, indices in (
            use.smem, use.tmem, use.collective_tmem, use.registers
        )
        for index in indices
    }
    places: dict[int, int] = {}
    offset = use.smem[0]
    for indices in use.barriers.values():
      for index in indices:
        places[index] = offset
        offset += self.rows[index].smem_bytes
    rows = []
    for index, row in enumerate(self.rows):
      if row.kind in ("barrier", "cluster barrier"):
        row = dataclasses.replace(
            row, in_total=index in places, offset_bytes=places.get(index)
        )
      elif row.smem_bytes or row.tmem_columns or row.registers_per_thread:
        row = dataclasses.replace(row, in_total=index in total)
      rows.append(row)
    return rows


def _profiler_bytes(params: Any, threads: int) -> int:
  """Returns what `profile_space` adds: two words for each end of each range.

  (`lower_jaxpr_to_module` of JAX, and its `ProfilerSpec.smem_bytes`.)
  """
  if not params.profile_space:
    return 0
  is_warp = params.profile_trace_scope.name == "WARP"
  traces = threads // (32 if is_warp else budget_rows.THREADS_PER_WARPGROUP)
  return 4 * traces * params.profile_space * 2 * 2
