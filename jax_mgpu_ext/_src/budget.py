"""Budgets: what a tree of specs, or a kernel, takes of a GPU, and if it fits.

Not modelled: what the compiler adds (registers other than accumulators, spills),
what a kernel asks for in `plgpu.inline_mgpu`, the pipeline of a `pl.pallas_call`,
and whether enough multiprocessors of one GPC are free for a whole cluster.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import math
from typing import Any

from jax_mgpu_ext._src import avals
from jax_mgpu_ext._src import budget_errors
from jax_mgpu_ext._src import budget_limits
from jax_mgpu_ext._src import budget_mesh
from jax_mgpu_ext._src import budget_rows
from jax_mgpu_ext._src import errors
from jax_mgpu_ext._src import spec_text
from jax_mgpu_ext._src import targets
from jax_mgpu_ext._src.budget_rows import Row
from jax_mgpu_ext._src.targets import Target


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget:
  """What a kernel takes of a GPU, item by item.

  Attributes:
    target: The GPU.
    rows: The items: SMEM scratch in the order of allocation, then barriers,
      then the rest.
    smem_bytes: Dynamic shared memory of the launch, in bytes a block; the rows
      with `in_total` add up to it.
    smem_limit_bytes: The most that the target gives.
    tmem_columns: Columns of TMEM that are allocated: a power of two, or 0.
    tmem_columns_requested: Those that were asked for, in chunks of 8.
    registers_per_thread: 32-bit registers that accumulators take in each CUDA
      thread of the warpgroups that use them.
    threads: CUDA threads of a block.
    grid: Sizes of the grid, in clusters.
    cluster_size: Blocks of a cluster.
    blocks_per_sm: Blocks that a multiprocessor holds at once, as far as SMEM,
      TMEM, threads and, if they are known, registers allow; 0 if it does not
      fit.
    limited_by: Which of them sets it: "smem", "tmem", "threads", "registers",
      or "blocks" for the limit on blocks itself.
    over: What does not fit, each with a code, the path of the largest item and
      a hint that says what would fit.
    warnings: What fits and still may not be what was meant.
  """

  target: Target
  rows: tuple[Row, ...]
  smem_bytes: int
  smem_limit_bytes: int
  tmem_columns: int
  tmem_columns_requested: int
  registers_per_thread: int
  threads: int
  grid: tuple[int, ...]
  cluster_size: int
  blocks_per_sm: int
  limited_by: str
  over: tuple[errors.SpecError, ...]
  warnings: tuple[str, ...]

  @property
  def fits(self) -> bool:
    """Whether a GPU of the target can run it."""
    return not self.over

  def raise_if_over(self) -> None:
    """Raises the first of `over`, if there is one.

    Raises:
      SpecError: It does not fit.
    """
    if self.over:
      raise self.over[0]

  def to_json(self) -> dict[str, Any]:
    """Returns it as plain numbers, strings, lists and dicts."""
    document: dict[str, Any] = {
        field.name: getattr(self, field.name)
        for field in dataclasses.fields(self)
    }
    return {
        **document,
        "target": self.target.name,
        "fits": self.fits,
        "grid": list(self.grid),
        "rows": [row.to_json() for row in self.rows],
        "over": [
            dict(code=e.code, path=e.path, problem=e.problem, hint=e.hint)
            for e in self.over
        ],
        "warnings": list(self.warnings),
    }


def budget(
    specs: Any,
    target: str | Target = "h100",
    *,
    grid: Sequence[int] = (),
    cluster: Sequence[int] = (),
    num_threads: int | None = 1,
    reduction_scratch_bytes: int = 0,
    registers_per_thread: int | None = None,
    root: str = "specs",
) -> Budget:
  """Returns what a kernel with these scratch types takes of a GPU.

  The bytes are those that Mosaic GPU allocates for `plgpu.kernel(...,
  scratch_types=specs)` whose body allocates nothing more; `budget_kernel` looks
  into the body.

  Args:
    specs: A tree of specs, whatever `avals.ref_avals` takes.
    target: The GPU, or its name; see `targets.get`.
    grid: Sizes of the grid, as given to `plgpu.kernel`.
    cluster: Sizes of the cluster, as given to `plgpu.kernel`.
    num_threads: Pallas threads of a block, that is, warpgroups; None: 1.
    reduction_scratch_bytes: SMEM for a reduction in the body, in bytes: that of
      `plgpu.CompilerParams`, 2048 by default, if there is one, else 0.
    registers_per_thread: Registers of the compiled kernel, for `blocks_per_sm`;
      None: not known.
    root: The name that paths start with.

  Raises:
    SpecError: A leaf is no spec, or a size is none; carries the path.
    TargetError: There is no such target.
  """
  target = targets.get(target)
  grid, cluster, threads = budget_mesh.sizes(grid, cluster, num_threads)
  budget_mesh.check_number(
      "reduction_scratch_bytes", reduction_scratch_bytes, 0
  )
  if registers_per_thread is not None:
    budget_mesh.check_number("registers_per_thread", registers_per_thread, 1)
  paths, leaves, costs = _costs(specs, root)
  refs = [avals.ref_aval(leaf) for leaf in leaves]
  rows: list[Row] = []
  offset = 0
  for path, ref, cost in zip(paths, refs, costs):
    if cost.barrier_key is None:
      rows += budget_rows.rows_of(path, ref, cost, offset)
      offset += cost.smem_bytes + cost.padding_bytes
  if reduction_scratch_bytes:
    rows.append(budget_rows.scratch_row(root, reduction_scratch_bytes, offset))
    offset += budget_rows.align(
        reduction_scratch_bytes, budget_rows.SMEM_ALIGNMENT
    )
  # Equal barriers stand together, whoever was asked for first.
  groups: dict[Any, list[int]] = {}
  for index, cost in enumerate(costs):
    if cost.barrier_key is not None:
      groups.setdefault(cost.barrier_key, []).append(index)
  for indices in groups.values():
    for index in indices:
      rows += budget_rows.rows_of(
          paths[index], refs[index], costs[index], offset
      )
      offset += costs[index].barrier_bytes
  totals = _totals(costs, cluster, threads, reduction_scratch_bytes)
  if totals.tmem_columns:
    rows.append(budget_rows.tmem_address_row(root, offset))
  found = assemble(
      target, totals, rows, costs,
      grid=grid, registers_per_thread=registers_per_thread,
  )
  if totals.has_accumulators and threads > budget_rows.THREADS_PER_WARPGROUP:
    warning = (
        "JAX refuses accumulators in the scratch_types of a kernel with several"
        " threads: allocate them in its body, with pl.run_scoped"
    )
    found = dataclasses.replace(found, warnings=(*found.warnings, warning))
  return found


def assemble(
    target: Target,
    totals: budget_limits.Totals,
    rows: Sequence[Row],
    costs: Sequence[budget_rows.Cost],
    *,
    grid: tuple[int, ...],
    registers_per_thread: int | None = None,
    where: str = "",
) -> Budget:
  """Returns a budget of what was counted.

  Args:
    target: The GPU.
    totals: The sums of the rows, and the mesh.
    rows: The items.
    costs: Those of all refs.
    grid: Sizes of the grid.
    registers_per_thread: Of the compiled kernel, if known.
    where: " in ..." for messages.
  """
  over = budget_errors.over(totals, target, rows, where)
  blocks, limited_by = budget_limits.blocks_per_sm(
      target,
      smem_bytes=totals.smem_bytes,
      threads=totals.threads,
      tmem_columns=totals.tmem_columns,
      registers_per_thread=registers_per_thread,
  )
  return Budget(
      target=target,
      rows=tuple(rows),
      smem_bytes=totals.smem_bytes,
      smem_limit_bytes=target.smem_bytes_per_block,
      tmem_columns=budget_rows.tmem_allocation(totals.tmem_columns),
      tmem_columns_requested=totals.tmem_columns,
      registers_per_thread=totals.registers_per_thread,
      threads=totals.threads,
      grid=grid,
      cluster_size=totals.cluster_size,
      blocks_per_sm=0 if over else blocks,
      limited_by=limited_by,
      over=tuple(over),
      warnings=tuple(budget_limits.warnings(totals, target, rows, costs)),
  )


def fits(
    specs: Any,
    target: str | Target = "h100",
    *,
    grid: Sequence[int] = (),
    cluster: Sequence[int] = (),
    num_threads: int | None = 1,
    reduction_scratch_bytes: int = 0,
) -> bool:
  """Returns whether `budget(...)` of the same arguments fits.

  Made for autotuners: at most 50 us for ten specs that were seen before (the
  same objects; `benchmarks/budget_fits.py`).

  Args:
    specs: As of `budget`.
    target: As of `budget`.
    grid: As of `budget`.
    cluster: As of `budget`.
    num_threads: As of `budget`.
    reduction_scratch_bytes: As of `budget`.

  Raises:
    SpecError: As `budget`.
    TargetError: As `budget`.
  """
  target = targets.get(target)
  _, cluster, threads = budget_mesh.sizes(grid, cluster, num_threads)
  budget_mesh.check_number(
      "reduction_scratch_bytes", reduction_scratch_bytes, 0
  )
  leaves, _ = avals.flatten(specs)
  cost_of_spec = budget_rows.cost_of_spec
  try:
    costs = [cost_of_spec(leaf) for leaf in leaves]
  except errors.SpecError:
    _costs(specs, "specs")  # Which says where it is.
    raise
  totals = _totals(costs, cluster, threads, reduction_scratch_bytes)
  return not budget_limits.codes(totals, target)


def _costs(
    specs: Any, root: str
) -> tuple[list[str], list[Any], list[budget_rows.Cost]]:
  """Returns the paths, leaves and costs of a tree of specs.

  Raises:
    SpecError: As `budget_rows.cost_of_spec`, with the path.
  """
  import jax  # pylint: disable=g-import-not-at-top

  paths, leaves, costs = [], [], []
  for path, leaf in jax.tree_util.tree_leaves_with_path(specs):
    try:
      costs.append(budget_rows.cost_of_spec(leaf))
    except errors.SpecError as e:
      spec_text.attach_path_at(e, specs, len(costs), root)
      raise
    paths.append(root + jax.tree_util.keystr(path))
    leaves.append(leaf)
  return paths, leaves, costs


def _totals(
    costs: Sequence[budget_rows.Cost],
    cluster: tuple[int, ...],
    threads: int,
    reduction_scratch_bytes: int,
) -> budget_limits.Totals:
  """Adds up the costs of a tree."""
  alignment = budget_rows.SMEM_ALIGNMENT
  smem = -(-reduction_scratch_bytes // alignment) * alignment
  columns = registers = 0
  orders_tensor_core = has_accumulators = False
  for cost in costs:
    smem += -(-cost.smem_bytes // alignment) * alignment + cost.barrier_bytes
    columns += cost.tmem_columns
    registers += cost.registers_per_thread
    orders_tensor_core |= cost.orders_tensor_core
    has_accumulators |= cost.kind == "accumulator"
  if columns:
    smem += budget_rows.TMEM_ADDRESS_BYTES
  return budget_limits.Totals(
      smem, columns, registers, math.prod(cluster), threads, has_accumulators,
      orders_tensor_core,
  )
