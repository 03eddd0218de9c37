"""Traces and lowers small kernels for CUDA on a machine without a GPU."""

from __future__ import annotations

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

F32 = jnp.float32
CLUSTER = dict(cluster=(2,), cluster_names=("x",))


def array(*shape, dtype=F32):
  return jax.ShapeDtypeStruct(shape or (128,), dtype)


def _copy(x, o, *scratch_refs, **named_scratch_refs):
  del scratch_refs, named_scratch_refs  # Unused.
  o[...] = x[...]


def lower(scratch=(), out=None, body=None, **kw):
  """Lowers a kernel that copies 128 numbers, with the scratch types given."""
  kernel = plgpu.kernel(
      body or _copy,
      out_type=array() if out is None else out,
      scratch_types=scratch,
      **kw,
  )
  traced = jax.jit(kernel).trace(jnp.zeros((128,), F32))
  return traced.lower(lowering_platforms=("cuda",))


def version() -> tuple[int, ...]:
  return tuple(int(n) for n in jax.__version__.split(".")[:3])
