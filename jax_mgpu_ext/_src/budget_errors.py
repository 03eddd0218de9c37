"""What a target cannot give, in words, with what would fit instead."""

from __future__ import annotations

from collections.abc import Sequence

from jax_mgpu_ext._src import budget_limits
from jax_mgpu_ext._src import budget_rows
from jax_mgpu_ext._src import errors
from jax_mgpu_ext._src.budget_limits import Totals
from jax_mgpu_ext._src.budget_rows import Row
from jax_mgpu_ext._src.targets import Target

# So many items are named; they are the largest.
_NAMED = 3


def over(
    totals: Totals, target: Target, rows: Sequence[Row], where: str = ""
) -> list[errors.SpecError]:
  """Returns an error for each of `budget_limits.codes`, with what would fit."""
  makers = {
      "MGPU101": lambda: _smem(totals, target, rows, where),
      "MGPU102": lambda: _tmem(totals, target, rows, where),
      "MGPU103": lambda: cluster(totals.cluster_size, target),
      "MGPU104": lambda: threads(totals.threads, target),
      "MGPU105": lambda: _accumulators(totals, target, rows, where),
      "MGPU106": lambda: tmem_ref(_first(rows, "tmem_columns"), target),
      "MGPU107": lambda: accumulator_ref(
          next(row for row in rows if row.kind == "accumulator"), target
      ),
      "MGPU108": lambda: tensor_core_barrier(
          next(
              row for row in rows if row.note == budget_rows.ORDERS_TENSOR_CORE
          ),
          target,
      ),
  }
  return [makers[code]() for code in budget_limits.codes(totals, target)]


def _first(rows: Sequence[Row], attribute: str) -> Row:
  return next(row for row in rows if getattr(row, attribute))


def shown(target: Target) -> str:
  """Writes a target for a message, as `h100 (sm_90a)`."""
  return f"{target.name} ({target.arch})"


def cluster(size: int, target: Target) -> errors.SpecError:
  """Returns the error for a cluster of too many blocks."""
  return errors.SpecError(
      f"expected at most {target.cluster_size_max} blocks in a cluster on"
      f" {shown(target)}, got {size}",
      code="MGPU103", path="cluster",
      hint=(
          f"Use {target.cluster_size_portable} or less, which every GPU takes,"
          " and move the rest into the grid"
      ),
  )


def threads(number: int, target: Target) -> errors.SpecError:
  """Returns the error for a block of too many CUDA threads."""
  most = target.threads_per_block // budget_rows.THREADS_PER_WARPGROUP
  return errors.SpecError(
      f"expected at most {most} warpgroups a block on {shown(target)}, got"
      f" {number // budget_rows.THREADS_PER_WARPGROUP}: they are {number} CUDA"
      f" threads, and there are {target.threads_per_block}",
      code="MGPU104", path="num_threads", hint=f"num_threads={most} fits",
  )


def tmem_ref(row: Row, target: Target) -> errors.SpecError:
  """Returns the error for a TMEM ref where there is no TMEM."""
  hint = "Write plgpu.SMEM(...) for data"
  if target.has_wgmma:
    hint += ", plgpu.ACC(...) for what wgmma adds up"
  return errors.SpecError(
      f"expected no TMEM refs on {shown(target)}, which has no tensor memory,"
      f" got {row.describe()} of {row.tmem_columns} columns",
      code="MGPU106", path=row.path, hint=hint,
  )


def accumulator_ref(row: Row, target: Target) -> errors.SpecError:
  """Returns the error for a WGMMA accumulator where there is no WGMMA."""
  hint = "Keep the sum in an array, and use plgpu.mma where JAX has it"
  if target.has_tcgen05:
    hint = (
        f"Write plgpu.TMEM({row.shape}, jnp.{row.dtype}), and multiply with"
        " plgpu.tcgen05_mma"
    )
  return errors.SpecError(
      f"expected no WGMMA accumulators on {shown(target)}: only compute"
      f" capability 9.0 has wgmma, got {row.describe()}",
      code="MGPU107", path=row.path, hint=hint,
  )


def tensor_core_barrier(row: Row, target: Target) -> errors.SpecError:
  """Returns the error for a barrier that orders a tensor core of tcgen05."""
  return errors.SpecError(
      f"expected no barriers with orders_tensor_core=True on {shown(target)},"
      f" which has no tcgen05 to fence, got {row.describe()}",
      code="MGPU108", path=row.path,
      hint="Leave orders_tensor_core out",
  )


def _smem(
    totals: Totals, target: Target, rows: Sequence[Row], where: str
) -> errors.SpecError:
  limit = target.smem_bytes_per_block
  items = largest(rows)
  names = ", ".join(
      f"{row.describe()} takes {row.smem_bytes + row.padding_bytes}"
      for row in items[:_NAMED]
  )
  if (more := len(items) - _NAMED) > 0:
    names += f", and {more} more"
  return errors.SpecError(
      f"expected at most {limit} bytes of SMEM a block on {shown(target)}, got"
      f" {totals.smem_bytes}{where}: {names or 'nothing that has a name'}",
      code="MGPU101", path=items[0].path if items else None,
      hint=what_fits(totals.smem_bytes, limit, rows),
  )


def largest(rows: Sequence[Row]) -> list[Row]:
  """Returns the rows that SMEM goes to, the largest first."""
  return sorted(
      (row for row in rows if row.in_total and row.smem_bytes),
      key=lambda row: -(row.smem_bytes + row.padding_bytes),
  )


def what_fits(total: int, limit: int, rows: Sequence[Row]) -> str:
  """Says what would fit into SMEM.

  For a ring, whose refs and barriers share their leading dimension, that is the
  largest number of stages.

  Args:
    total: Bytes of all rows.
    limit: Bytes that there are.
    rows: The items.
  """
  rest = _smaller(total, limit, rows)
  ring = _ring(rows)
  if not ring:
    return rest
  num_stages = ring[0].shape[0]

  def with_stages(number: int) -> int:
    size = total
    for row in ring:
      size -= row.smem_bytes + row.padding_bytes
      scaled = row.smem_bytes // num_stages * number
      unit = 1 if "barrier" in row.kind else budget_rows.SMEM_ALIGNMENT
      size += budget_rows.align(scaled, unit)
    return size

  names = ", ".join(row.path for row in ring[:_NAMED])
  names += ", ..." if len(ring) > _NAMED else ""
  for number in range(num_stages - 1, 0, -1):
    if with_stages(number) <= limit:
      return (
          f"num_stages={number} fits, with {with_stages(number)} bytes, instead"
          f" of the {num_stages} of {names}"
      )
  return f"num_stages=1 of {names} still takes {with_stages(1)} bytes. {rest}"


def _smaller(total: int, limit: int, rows: Sequence[Row]) -> str:
  """Says how small the largest item must be, for all to fit."""
  items = largest(rows)
  if not items:
    return f"Make it {total - limit} bytes smaller"
  largest_row = items[0]
  others = total - largest_row.smem_bytes - largest_row.padding_bytes
  unit = 1 if "barrier" in largest_row.kind else budget_rows.SMEM_ALIGNMENT
  if (room := (limit - others) // unit * unit) > 0:
    return f"At most {room} bytes fit as {largest_row.path}, beside the rest"
  return (
      f"Without {largest_row.path} it would still be {others} bytes: put small"
      " refs, each of which takes 1024 bytes, into one, or share memory by"
      " plgpu.RefUnion"
  )


def _ring(rows: Sequence[Row]) -> list[Row]:
  """Returns the rows of the largest ring: refs with one leading dimension."""
  rings: dict[int, list[Row]] = {}
  for row in rows:
    if not row.in_total or not row.shape or row.shape[0] < 2:
      continue
    if "barrier" in row.kind or (row.kind == "smem" and len(row.shape) > 1):
      rings.setdefault(row.shape[0], []).append(row)
  # One ref alone may have any leading dimension.
  found = [
      ring for ring in rings.values()
      if len(ring) > 1 and any(row.kind == "smem" for row in ring)
  ]
  size = lambda ring: sum(row.smem_bytes for row in ring)
  return max(found, key=size, default=[])


def _tmem(
    totals: Totals, target: Target, rows: Sequence[Row], where: str
) -> errors.SpecError:
  taken = budget_rows.tmem_allocation(totals.tmem_columns)
  items = sorted(
      (row for row in rows if row.in_total and row.tmem_columns),
      key=lambda row: -row.tmem_columns,
  )
  names = ", ".join(
      f"{row.describe()} wants {row.tmem_columns}" for row in items[:_NAMED]
  )
  return errors.SpecError(
      f"expected at most {target.tmem_columns} columns of TMEM a block on"
      f" {shown(target)}, got {taken} ({totals.tmem_columns} rounded up to a"
      f" power of two){where}: {names}",
      code="MGPU102", path=items[0].path,
      hint=(
          f"Use {totals.tmem_columns - target.tmem_columns} columns less, or"
          " let refs that are not used at once share them in a RefUnion"
      ),
  )


def _accumulators(
    totals: Totals, target: Target, rows: Sequence[Row], where: str
) -> errors.SpecError:
  items = sorted(
      (row for row in rows if row.in_total and row.registers_per_thread),
      key=lambda row: -row.registers_per_thread,
  )
  names = ", ".join(
      f"{row.describe()} takes {row.registers_per_thread}"
      for row in items[:_NAMED]
  )
  return errors.SpecError(
      f"expected accumulators of at most {target.registers_per_thread}"
      f" registers a thread on {shown(target)}, got"
      f" {totals.registers_per_thread}{where}: {names}",
      code="MGPU105", path=items[0].path,
      hint=(
          "Split the tile: over more warpgroups (num_threads), or into several"
          " passes"
      ),
  )
