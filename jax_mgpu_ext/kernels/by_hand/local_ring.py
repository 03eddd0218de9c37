"""The kernel `local_ring`, with JAX's own specs, written out.

It computes what `jax_mgpu_ext.kernels.local_ring` does, whose docstring
explains the protocol: who may arrive and wait, and why it is race free. Both
compile to the same PTX.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from jax_mgpu_ext.kernels import local_ring as spec_version


def specs(
    *,
    num_stages=3,
    num_consumers=1,
    filled_by="tma",
    tile=(64, 64),
    dtype=jnp.float32,
) -> list:
  """Returns the scratch types of the kernel, for `plgpu.kernel`."""
  return [
      plgpu.SMEM((num_stages, *tile), dtype),
      plgpu.SMEM((num_stages, *tile), dtype),
      plgpu.Barrier(
          num_arrivals=2 if filled_by == "tma" else 1, num_barriers=num_stages
      ),
      plgpu.Barrier(num_arrivals=num_consumers, num_barriers=num_stages),
      plgpu.SMEM(tile, jnp.float32),
  ]


def make_kernel(
    *,
    num_blocks: int = 1,
    num_steps: int = 8,
    num_stages: int = 3,
    num_consumers: int = 1,
    filled_by: str = "tma",
    unroll: bool = False,
    tile=(64, 64),
    dtype=jnp.float32,
    interpret=None,
) -> Callable[[jax.Array, jax.Array], jax.Array]:
  """Builds the kernel; arguments and result as in the spec version."""
  rows, cols = spec_version.check_arguments(
      num_blocks, num_steps, num_stages, num_consumers, filled_by, tile, dtype
  )
  share = rows // num_consumers

  def stage_of(step):
    return step % num_stages if unroll else lax.rem(step, num_stages)

  def local_ring(a, b, y, a_smem, b_smem, full, empty, y_smem):
    block = lax.axis_index("block")
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == 0)
    def _producer():

      @spec_version.steps(num_steps, unroll)
      def _fill(step):
        at = pl.ds(step * rows, rows)
        stage = stage_of(step)

        def acquire():
          plgpu.barrier_wait(empty.at[stage])

        if not unroll:
          pl.when(step >= num_stages)(acquire)
        elif step >= num_stages:
          acquire()

        if filled_by == "tma":
          plgpu.copy_gmem_to_smem(
              a.at[block, at], a_smem.at[stage], full.at[stage]
          )
          plgpu.copy_gmem_to_smem(
              b.at[block, at], b_smem.at[stage], full.at[stage]
          )
        else:
          a_smem[stage] = a[block, at]
          b_smem[stage] = b[block, at]
          plgpu.barrier_arrive(full.at[stage])

      @pl.loop(max(0, num_steps - num_stages), num_steps)
      def _tail(step):
        plgpu.barrier_wait(empty.at[lax.rem(step, num_stages)])

    @pl.when(warpgroup > 0)
    def _consumer():
      mine = pl.ds((warpgroup - 1) * share, share)

      def take(step):
        stage = stage_of(step)
        plgpu.barrier_wait(full.at[stage])
        value = a_smem[stage, mine].astype(jnp.float32)
        value *= b_smem[stage, mine].astype(jnp.float32)
        if filled_by == "tma":
          plgpu.commit_smem()
        plgpu.barrier_arrive(empty.at[stage])
        return value

      y_smem[mine] = spec_version.total_of(
          take, num_steps, unroll, (share, cols)
      )
      plgpu.commit_smem()
      plgpu.copy_smem_to_gmem(y_smem.at[mine], y.at[block, mine])
      plgpu.wait_smem_to_gmem(0)

  return jax.jit(
      plgpu.kernel(
          local_ring,
          out_type=jax.ShapeDtypeStruct((num_blocks, rows, cols), jnp.float32),
          scratch_types=specs(
              num_stages=num_stages,
              num_consumers=num_consumers,
              filled_by=filled_by,
              tile=(rows, cols),
              dtype=dtype,
          ),
          grid=(num_blocks,),
          grid_names=("block",),
          num_threads=1 + num_consumers,
          thread_name="warpgroup",
          interpret=interpret,
      )
  )
