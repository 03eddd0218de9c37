"""Faults of a kernel that the interpreter passes over, and a GPU does not.

It takes the nearest barrier for an index that is out of range, and has as much
shared memory as the machine has.
"""

from __future__ import annotations

import math
import threading
from typing import Any

import jax
from jax._src.pallas import core as pallas_core
from jax._src.pallas.mosaic_gpu import core as mosaic_gpu_core
from jax._src.state import indexing
import jax.numpy as jnp
import numpy as np

from jax_mgpu_ext._src import errors
from jax_mgpu_ext._src import targets

# Stands in an allocation key for a barrier that is not there.
_OUTSIDE = -7777
_MBARRIER_BYTES = 8
_tracing = threading.local()


def barrier_key(original, inval, transforms_treedef, transforms_leaves):
  """Returns the key of one barrier; one that says what is wrong, if it is.

  Static indices have been checked when they were written.
  """
  key = original(inval, transforms_treedef, transforms_leaves)
  if transforms_treedef is None:
    return key
  indices = []
  for transform in jax.tree.unflatten(transforms_treedef, transforms_leaves):
    if isinstance(transform, indexing.NDIndexer):
      indices += transform.indices
  for dim, index in enumerate(indices):
    if isinstance(index, indexing.Slice):
      index = index.start
    if isinstance(index, (int, np.integer)):
      continue
    size = inval.shape[dim]
    index = jnp.asarray(index).astype(jnp.int32)
    none = np.full(key.shape, 0, np.int32)
    none[0], none[2], none[-1] = _OUTSIDE, dim, size
    key = jnp.where(
        (index >= 0) & (index < size), key,
        jnp.asarray(none).at[1].set(index).astype(key.dtype),
    )
  return key


def check_key(key: Any) -> None:
  """Raises if a key is that of a barrier that is not there."""
  if key.memory_space_id == _OUTSIDE:
    raise errors.BarrierIndexError(
        f"barrier index {key.device_id} is out of range for dimension"
        f" {key.block_id} of a barrier array, whose size is {key.buffer_id}"
        " (num_barriers)",
        code="MGPU026",
        hint=f"Legal are 0 to {key.buffer_id - 1}. In a ring, take the step"
        " modulo the number of stages",
    )


def get_barrier(original, self, key, *args, **kwargs):
  check_key(key)
  return original(self, key, *args, **kwargs)


def scope_smem_bytes(avals: Any) -> int:
  """Returns the bytes of SMEM that refs and barriers take, without padding."""
  total = 0
  for aval in avals:
    space = getattr(aval, "memory_space", None)
    dtype = getattr(aval, "dtype", None)
    if isinstance(dtype, pallas_core.AbstractSemaphoreTy):
      raise errors.spec_error_like(NotImplementedError)(
          "semaphores as scratch are not supported in GPU interpret mode by JAX",
          code="MGPU128", hint="Synchronize by barriers, or run it on a GPU",
      )
    size = math.prod(getattr(aval, "shape", ()))
    if isinstance(
        dtype,
        (mosaic_gpu_core.BarrierType, mosaic_gpu_core.ClusterBarrierType),
    ):
      total += _MBARRIER_BYTES * size
    elif space == mosaic_gpu_core.SMEM:
      try:
        bits = (
            jnp.finfo(dtype).bits if jnp.issubdtype(dtype, jnp.floating)
            else jnp.iinfo(dtype).bits
        )
      except (TypeError, ValueError):
        bits = 8  # Booleans, and whatever else has no information.
      total += size * bits // 8
  return total


class Scope:
  """Counts the SMEM of a `run_scoped` while its body is traced."""

  def __init__(self, avals: Any):
    self._bytes = scope_smem_bytes(avals)

  def __enter__(self):
    used = getattr(_tracing, "smem_bytes", 0) + self._bytes
    # All that are known have the same, and the interpreter asks for none.
    limit = max(targets.get(name).smem_bytes_per_block for name in targets.names())
    if used > limit:
      raise errors.SpecError(
          f"expected at most {limit} bytes of SMEM a block, on any GPU that is"
          f" known, got {used}",
          code="MGPU101",
          hint="jax_mgpu_ext.budget.budget(specs, target) tells what they go to",
      )
    _tracing.smem_bytes = used

  def __exit__(self, *unused):
    _tracing.smem_bytes = getattr(_tracing, "smem_bytes", 0) - self._bytes
