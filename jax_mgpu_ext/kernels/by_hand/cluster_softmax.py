"""The kernel `cluster_softmax`, with JAX's own specs, written out.

It computes what `jax_mgpu_ext.kernels.cluster_softmax` does, whose docstring
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

from jax_mgpu_ext.kernels import cluster_softmax as spec_version

# Bytes of a row of a swizzled tile, widest first; 16 is none.
_SWIZZLES = (128, 64, 32, 16)


def tile_transforms(cols: int, dtype) -> tuple:
  """Returns the widest swizzle that fits rows of so many elements."""
  itemsize = jnp.dtype(dtype).itemsize
  swizzle = next(s for s in _SWIZZLES if not cols * itemsize % s)
  tiling = plgpu.TilingTransform((8, swizzle // itemsize))
  if swizzle == 16:
    return (tiling,)
  return (tiling, plgpu.SwizzleTransform(swizzle))


def barrier_of_cluster(num_blocks: int):
  """Returns a barrier at which each block of a cluster arrives once."""
  if num_blocks > 1:
    return plgpu.ClusterBarrier(
        collective_axes=("block",), num_arrivals=1, num_barriers=1
    )
  return plgpu.Barrier(num_arrivals=1, num_barriers=1)


def specs(
    *, num_blocks=2, num_stages=2, tile=(64, 128), dtype=jnp.float32
) -> list:
  """Returns the scratch types of the kernel, for `plgpu.kernel`."""
  transforms = tile_transforms(tile[1], dtype)
  return [
      plgpu.SMEM((num_stages, *tile), dtype, transforms=transforms),
      plgpu.Barrier(num_arrivals=1, num_barriers=num_stages),
      plgpu.Barrier(num_arrivals=1, num_barriers=num_stages),
      plgpu.SMEM(tile, dtype, transforms=transforms),
      plgpu.SMEM((tile[0],), jnp.float32),
      plgpu.SMEM((tile[0],), jnp.float32),
      barrier_of_cluster(num_blocks),
      barrier_of_cluster(num_blocks),
  ]


def make_kernel(
    *,
    num_blocks: int = 2,
    num_clusters: int = 1,
    num_steps: int = 4,
    num_stages: int = 2,
    tile=(64, 128),
    dtype=jnp.float32,
    interpret=None,
) -> Callable[[jax.Array], jax.Array]:
  """Builds the kernel; arguments and result as in the spec version."""
  rows, cols = spec_version.check_arguments(
      num_blocks, num_clusters, num_steps, num_stages, tile, dtype
  )

  def cluster_softmax(
      x, y, x_smem, full, empty, y_smem, maxima, totals, posted, read
  ):
    block = lax.axis_index("block")
    warpgroup = lax.axis_index("warpgroup")
    first_row = lax.axis_index("cluster") * (num_steps * rows)

    def tile_of(ref, step):
      return ref.at[
          pl.ds(first_row + step * rows, rows), pl.ds(block * cols, cols)
      ]

    @pl.when(warpgroup == 0)
    def _producer():

      @pl.loop(0, num_steps)
      def _fill(step):
        stage = lax.rem(step, num_stages)

        @pl.when(step >= num_stages)
        def _acquire():
          plgpu.barrier_wait(empty.at[stage])

        plgpu.copy_gmem_to_smem(
            tile_of(x, step), x_smem.at[stage], full.at[stage]
        )

      @pl.loop(max(0, num_steps - num_stages), num_steps)
      def _tail(step):
        plgpu.barrier_wait(empty.at[lax.rem(step, num_stages)])

    @pl.when(warpgroup == 1)
    def _consumer():

      @pl.loop(0, num_steps)
      def _step(step):
        stage = lax.rem(step, num_stages)
        plgpu.barrier_wait(full.at[stage])
        value = spec_version.load(x_smem.at[stage], plgpu.Layout.WGMMA)
        plgpu.commit_smem()
        plgpu.barrier_arrive(empty.at[stage])
        exps, maximum, total = spec_version.softmax_of_part(
            value.astype(jnp.float32)
        )

        @pl.when(step > 0)
        def _reuse():
          plgpu.barrier_wait(read)

        maxima[...] = maximum
        totals[...] = total
        plgpu.commit_smem()
        plgpu.barrier_arrive(posted)
        plgpu.barrier_wait(posted)
        scale = spec_version.scale_of_part(
            maximum,
            spec_version.read_cluster(maxima, num_blocks),
            spec_version.read_cluster(totals, num_blocks),
        )
        plgpu.commit_smem()
        plgpu.barrier_arrive(read)

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        y_smem[...] = (
            exps * spec_version.over_rows(scale, exps.shape)
        ).astype(dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(y_smem, tile_of(y, step))

      plgpu.barrier_wait(read)
      plgpu.wait_smem_to_gmem(0)

  return jax.jit(
      plgpu.kernel(
          cluster_softmax,
          out_type=spec_version.out_type(
              num_blocks, num_clusters, num_steps, (rows, cols), dtype
          ),
          scratch_types=specs(
              num_blocks=num_blocks,
              num_stages=num_stages,
              tile=(rows, cols),
              dtype=dtype,
          ),
          grid=(num_clusters,),
          grid_names=("cluster",),
          cluster=(num_blocks,),
          cluster_names=("block",),
          num_threads=2,
          thread_name="warpgroup",
          interpret=interpret,
      )
  )
