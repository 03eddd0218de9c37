"""What a target's limits say about what a kernel takes."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
from typing import Any

from jax_mgpu_ext._src import budget_rows
from jax_mgpu_ext._src.budget_rows import Row
from jax_mgpu_ext._src.targets import Target

# Shared memory is given to a block in units of it, registers to a warp
# (`cudaOccSMemAllocationGranularity` and `cudaOccRegAllocationGranularity` in
# cuda_occupancy.h of the CUDA toolkit, compute capability 9.0 and later).
_SMEM_UNIT = 128
# In the PTX of kernels that use SMEM, Mosaic names where it begins by a variable
# of one byte, which is static shared memory (ptxas: "1 bytes smem").
STATIC_SMEM_BYTES = 1
_REGISTER_UNIT = 256
# Each of the four parts of a multiprocessor has its own registers
# (`cudaOccSubPartitionsPerMultiprocessor`, the same header).
_PARTS = 4
_WARP = 32


@dataclasses.dataclass(frozen=True, slots=True)
class Totals:
  """What a kernel wants of a block's resources.

  Attributes:
    smem_bytes: Dynamic shared memory of the launch.
    tmem_columns: Columns of TMEM asked for, in chunks of 8.
    registers_per_thread: Those of accumulators.
    cluster_size: Blocks of a cluster.
    threads: CUDA threads of a block.
    has_accumulators: Whether there are any.
    orders_tensor_core: Whether a barrier does.
  """

  smem_bytes: int
  tmem_columns: int
  registers_per_thread: int
  cluster_size: int
  threads: int
  has_accumulators: bool
  orders_tensor_core: bool


def codes(totals: Totals, target: Target) -> list[str]:
  """Returns the codes of what does not fit; quick, for autotuners."""
  found = []
  if totals.cluster_size > target.cluster_size_max:
    found.append("MGPU103")
  if totals.threads > target.threads_per_block:
    found.append("MGPU104")
  if totals.smem_bytes > target.smem_bytes_per_block:
    found.append("MGPU101")
  if totals.tmem_columns:
    if not target.has_tcgen05:
      found.append("MGPU106")
    elif (
        budget_rows.tmem_allocation(totals.tmem_columns) > target.tmem_columns
    ):
      found.append("MGPU102")
  if totals.registers_per_thread > target.registers_per_thread:
    found.append("MGPU105")
  if totals.has_accumulators and not target.has_wgmma:
    found.append("MGPU107")
  if totals.orders_tensor_core and not target.has_tcgen05:
    found.append("MGPU108")
  return found


def warnings(
    totals: Totals, target: Target, rows: Sequence[Row], costs: Sequence[Any]
) -> list[str]:
  """Returns what fits, and still may not be what was meant."""
  found = []
  size = totals.cluster_size
  if totals.smem_bytes == target.smem_bytes_per_block:
    # CUDA Driver API, `cuKernelSetAttribute`: what is static counts, too.
    found.append(
        f"all {totals.smem_bytes} bytes of SMEM that a block may have are taken,"
        " which leaves none for the byte that Mosaic declares: JAX accepts it,"
        " CUDA may refuse the launch"
    )
  if target.cluster_size_portable < size <= target.cluster_size_max:
    found.append(
        f"a cluster of {size} blocks is larger than the"
        f" {target.cluster_size_portable} that every GPU accepts"
    )
  registers = totals.registers_per_thread * totals.threads
  if registers > target.registers_per_block:
    found.append(
        f"accumulators of {totals.registers_per_thread} registers in each of"
        f" {totals.threads} CUDA threads are more than the"
        f" {target.registers_per_block} registers of a block: unless only some"
        " warpgroups use them, and plgpu.set_max_registers gives them the"
        " others', they spill"
    )
  collective = [cost.collective for cost in costs if cost.tmem_columns]
  if any(collective) and not all(collective):
    found.append("JAX refuses collective and other TMEM refs in one kernel")
  if any(collective) and size % 2:
    found.append(
        "JAX refuses collective TMEM refs unless the cluster has an even number"
        f" of blocks, this one has {size}"
    )
  for row in rows:
    if row.kind == "gmem":
      found.append(f"JAX allocates no GMEM as scratch: {row.describe()}")
  return found


def blocks_per_sm(
    target: Target,
    *,
    smem_bytes: int,
    threads: int,
    tmem_columns: int = 0,
    registers_per_thread: int | None = None,
) -> tuple[int, str]:
  """Returns how many blocks a multiprocessor holds at once, and what sets it.

  Args:
    target: The GPU.
    smem_bytes: Dynamic shared memory of a block.
    threads: CUDA threads of a block.
    tmem_columns: Columns of TMEM that a block asks for.
    registers_per_thread: Those of the compiled kernel; None: not known.
  """
  smem = smem_bytes + target.smem_bytes_reserved_per_block
  if smem_bytes:
    smem += STATIC_SMEM_BYTES
  smem = budget_rows.align(smem, _SMEM_UNIT)
  limits = {
      "blocks": target.blocks_per_sm,
      "threads": target.threads_per_sm // threads,
  }
  if smem:
    limits["smem"] = target.smem_bytes_per_sm // smem
  if smem_bytes == target.smem_bytes_per_block:
    limits["smem"] = 1  # See `warnings`.
  if tmem_columns:
    taken = budget_rows.tmem_allocation(tmem_columns)
    limits["tmem"] = target.tmem_columns // taken
  if registers_per_thread:
    per_warp = budget_rows.align(registers_per_thread * _WARP, _REGISTER_UNIT)
    warps = target.registers_per_sm // _PARTS // per_warp * _PARTS
    limits["registers"] = warps // -(-threads // _WARP)
  name = min(limits, key=limits.__getitem__)
  return limits[name], name
