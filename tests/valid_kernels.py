"""Valid kernels, which must stay byte for byte the same with hooks on.

Each is a function of no arguments that returns (function, arguments) anew, so
that no trace of an earlier call can be reused.
"""

from __future__ import annotations

import functools

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from tests.lowering import array
from tests.lowering import F32

_AXIS = object()
_TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


def _zeros(*shape, dtype=F32):
  return jnp.zeros(shape, dtype)


def copy():
  @functools.partial(plgpu.kernel, out_type=array())
  def kernel(x, o):
    o[...] = x[...]
  return kernel, (_zeros(128),)


def named_scratch():
  def kernel(x, o, *, done, stages):
    plgpu.copy_gmem_to_smem(x, stages.at[0], done.at[1])
    plgpu.barrier_wait(done.at[1])
    o[...] = stages[0]
  return plgpu.kernel(
      kernel, out_type=array(),
      scratch_types=dict(
          done=plgpu.Barrier(num_barriers=2), stages=plgpu.SMEM((2, 128), F32)
      ),
  ), (_zeros(128),)


def keyword_specs():
  """Every constructor with its arguments by keyword, and in between."""
  def kernel(x, o, whole, half, tiled, one, many):
    del half, tiled, one, many
    whole[...] = x[...]
    o[...] = whole[...]
  return plgpu.kernel(
      kernel, out_type=array(),
      scratch_types=[
          plgpu.SMEM(shape=(128,), dtype=F32),
          plgpu.SMEM((128,), dtype=jnp.float16),
          plgpu.SMEM(
              dtype=jnp.float16, shape=[64, 64], transforms=list(_TILED)
          ),
          plgpu.Barrier(num_arrivals=1, num_barriers=(2,)),
          plgpu.RefUnion(
              plgpu.SMEM(dtype=F32, shape=(128,)),
              [plgpu.SMEM((8, 128), dtype=jnp.float16)],
          ),
      ],
  ), (_zeros(128),)


def nested_scratch():
  def kernel(x, o, pair, rest):
    buffer, done = pair
    plgpu.copy_gmem_to_smem(x, buffer, done.at[0])
    plgpu.barrier_wait(done.at[0])
    o[...] = buffer[...] + rest["more"][...]
  return plgpu.kernel(
      kernel, out_type=array(),
      scratch_types=[
          (plgpu.SMEM((128,), F32), plgpu.Barrier(num_barriers=(1,))),
          dict(more=plgpu.SMEM((128,), F32), none=None),
      ],
  ), (_zeros(128),)


def cluster_exchange():
  def kernel(x, scratch, o, barrier):
    me = lax.axis_index("x")
    scratch[me, :] = x[me, :]
    plgpu.barrier_arrive(barrier.at[0])
    plgpu.barrier_wait(barrier.at[0])
    o[me, :] = scratch[1 - me, :]
  return plgpu.kernel(
      kernel, out_type=array(2, 128), grid=(3,), grid_names=("g",),
      cluster=(2,), cluster_names=("x",), num_threads=2, thread_name="t",
      scratch_types=[
          plgpu.ClusterBarrier(
              collective_axes=("x",), num_barriers=1, num_arrivals=2
          )
      ],
  ), (_zeros(2, 128), _zeros(2, 128))


def object_axis():
  def kernel(x, o, barrier):
    plgpu.barrier_arrive(barrier.at[0])
    plgpu.barrier_wait(barrier.at[0])
    o[...] = x[...]
  return plgpu.kernel(
      kernel, out_type=array(), cluster=(2,), cluster_names=(_AXIS,),
      scratch_types=[
          plgpu.ClusterBarrier(collective_axes=(_AXIS,), num_barriers=1)
      ],
  ), (_zeros(128),)


def tiled_multicast():
  def kernel(x, o, buffer, done):
    plgpu.copy_gmem_to_smem(
        x, buffer, done.at[0], collective_axes="x"
    )
    plgpu.barrier_wait(done.at[0])
    plgpu.copy_smem_to_gmem(buffer, o.at[lax.axis_index("x")])
    plgpu.wait_smem_to_gmem(0)
  return plgpu.kernel(
      kernel, out_type=array(2, 64, 64, dtype=jnp.float16),
      cluster=(2,), cluster_names=("x",),
      scratch_types=[
          plgpu.SMEM((64, 64), jnp.float16, transforms=_TILED),
          plgpu.Barrier(num_barriers=1),
      ],
  ), (_zeros(64, 64, dtype=jnp.float16),)


def wgmma():
  def kernel(a, b, o, a_smem, b_smem, done):
    plgpu.copy_gmem_to_smem(a, a_smem, done.at[0])
    plgpu.copy_gmem_to_smem(b, b_smem, done.at[0])
    plgpu.barrier_wait(done.at[0])
    def scope(acc):
      plgpu.wgmma(acc, a_smem, b_smem)
      return acc[...]
    o[...] = pl.run_scoped(scope, plgpu.ACC((64, 64), F32))
  return plgpu.kernel(
      kernel, out_type=array(64, 64),
      scratch_types=[
          plgpu.SMEM((64, 64), jnp.float16, transforms=_TILED),
          plgpu.SMEM((64, 64), jnp.float16, transforms=_TILED),
          plgpu.Barrier(num_arrivals=2, num_barriers=1),
      ],
  ), (_zeros(64, 64, dtype=jnp.float16), _zeros(64, 64, dtype=jnp.float16))


def run_scoped():
  def kernel(x, o):
    def scope(first, *, second, done):
      plgpu.copy_gmem_to_smem(x, first, done.at[0])
      plgpu.barrier_wait(done.at[0])
      second[...] = first[...]
      o[...] = second[...]
    pl.run_scoped(
        scope, plgpu.SMEM((128,), F32), second=plgpu.SMEM((128,), F32),
        done=plgpu.Barrier(num_barriers=1),
    )
  return plgpu.kernel(kernel, out_type=array()), (_zeros(128),)


def ref_union():
  def kernel(x, o, union):
    first, (second, _) = union
    first[...] = x[...]
    second[...] = x[...]
    o[...] = second[...]
  return plgpu.kernel(
      kernel, out_type=array(),
      scratch_types=[
          plgpu.RefUnion(
              plgpu.SMEM((128,), F32),
              (plgpu.SMEM((128,), F32), plgpu.SMEM((8, 128), jnp.float16)),
          )
      ],
  ), (_zeros(128),)


def semaphore():
  def kernel(x, o, sem):
    pl.semaphore_signal(sem)
    pl.semaphore_wait(sem)
    o[...] = x[...]
  return plgpu.kernel(
      kernel, out_type=array(),
      scratch_types=[plgpu.SemaphoreType.REGULAR],
  ), (_zeros(128),)


def several_outputs():
  def kernel(x, o, p):
    o[...] = x[...]
    p[...] = x[...] + 1
  return plgpu.kernel(
      kernel, out_type=(array(), plgpu.GMEM((128,), F32))
  ), (_zeros(128),)


def vmapped():
  kernel, (x,) = named_scratch()
  return jax.vmap(kernel), (jnp.stack([x, x]),)


def pipeline():
  def kernel(x, o):
    def body(_, x_smem, o_smem):
      o_smem[...] = x_smem[...] + 1
    spec = plgpu.BlockSpec(
        (64, 64), lambda i: (i, 0), transforms=_TILED
    )
    plgpu.emit_pipeline(
        body, grid=(4,), in_specs=[spec], out_specs=[spec],
        max_concurrent_steps=2,
    )(x, o)
  return plgpu.kernel(
      kernel, out_type=array(256, 64, dtype=jnp.float16)
  ), (_zeros(256, 64, dtype=jnp.float16),)


def plain_pallas_call():
  def kernel(x, o, scratch):
    scratch[...] = x[...]
    o[...] = scratch[...]
  return pl.pallas_call(
      kernel, out_shape=array(), grid=(2,),
      in_specs=[pl.BlockSpec((128,), lambda i: (0,))],
      out_specs=pl.BlockSpec((128,), lambda i: (0,)),
      scratch_shapes=[plgpu.SMEM((128,), F32)], interpret=True,
  ), (_zeros(128),)


KERNELS = (
    copy, named_scratch, keyword_specs, nested_scratch, cluster_exchange,
    object_axis, tiled_multicast, wgmma, run_scoped, ref_union, semaphore, several_outputs,
    vmapped, pipeline, plain_pallas_call,
)
