"""The kernel `blackwell_gemm`, with JAX's own specs, written out.

It computes what `jax_mgpu_ext.kernels.blackwell_gemm` does, whose docstring
explains the protocol: who may arrive and wait, and why it is race free. Both
compile to the same PTX.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from jax_mgpu_ext.kernels import blackwell_tiles
from jax_mgpu_ext.kernels.blackwell_tiles import GemmConfig


def specs(*, config: GemmConfig = GemmConfig(), dtype=jnp.float16) -> list:
  """Returns the scratch types of the kernel, for `plgpu.kernel`."""
  bits = jnp.dtype(dtype).itemsize * 8
  transforms = _transforms(config.tile_k, bits)
  stages = config.num_stages
  if config.collective:
    acc_empty = plgpu.ClusterBarrier(
        collective_axes=("x",),
        num_arrivals=1,
        num_barriers=config.num_accumulators,
        orders_tensor_core=True,
    )
  else:
    acc_empty = plgpu.Barrier(
        num_arrivals=1,
        num_barriers=config.num_accumulators,
        orders_tensor_core=True,
    )
  return [
      plgpu.SMEM(
          (stages, config.tile_m, config.tile_k), dtype, transforms=transforms
      ),
      plgpu.SMEM(
          (stages, config.tile_k, config.tile_n), dtype, transforms=transforms
      ),
      plgpu.Barrier(num_arrivals=2, num_barriers=stages),
      plgpu.Barrier(
          num_arrivals=1, num_barriers=stages, orders_tensor_core=True
      ),
      plgpu.TMEM(
          (config.tile_m, config.num_accumulators * config.mma_n),
          jnp.float32,
          collective=config.collective,
      ),
      plgpu.Barrier(
          num_arrivals=1,
          num_barriers=config.num_accumulators,
          orders_tensor_core=True,
      ),
      acc_empty,
      plgpu.SMEM(
          (2, config.tile_m, config.epilogue_tile_n),
          dtype,
          transforms=_transforms(config.epilogue_tile_n, bits),
      ),
  ]


def _transforms(cols: int, bits: int):
  swizzle = plgpu.find_swizzle(cols * bits)
  return (
      plgpu.TilingTransform((8, swizzle * 8 // bits)),
      plgpu.SwizzleTransform(swizzle),
  )


def make_kernel(
    *,
    m: int = 1024,
    n: int = 1024,
    k: int = 512,
    config: GemmConfig = GemmConfig(),
    dtype: Any = jnp.float16,
    num_clusters: int | None = None,
    interpret: Any = None,
) -> Callable[[jax.Array, jax.Array], jax.Array]:
  """Builds the kernel; arguments and result as in the spec version."""
  tiles = blackwell_tiles.tiles_of(m, n, k, dtype, config, num_clusters)
  axis = "x" if config.collective else None
  num_stages = config.num_stages
  num_accs = config.num_accumulators

  def blackwell_gemm(
      a, b, c,
      a_smem, b_smem, full, empty, acc_tmem, acc_full, acc_empty, c_smem,
  ):
    cluster = lax.axis_index("cluster")
    block = lax.axis_index("x")
    warpgroup = lax.axis_index("warpgroup")
    num_tiles = tiles.of_cluster(cluster)

    def load():

      @pl.loop(0, num_tiles)
      def _tile(tile):
        m, n = tiles.index(tile, cluster, config)
        rows = pl.ds(m * config.mma_m, config.mma_m)
        cols = pl.ds(n * config.mma_n, config.mma_n)

        @pl.loop(0, tiles.k)
        def _step(k):
          step = tile * tiles.k + k
          at = pl.ds(k * config.tile_k, config.tile_k)
          stage = lax.rem(step, num_stages)

          @pl.when(step >= num_stages)
          def _acquire():
            plgpu.barrier_wait(empty.at[stage])

          plgpu.copy_gmem_to_smem(
              a.at[rows, at],
              a_smem.at[stage],
              full.at[stage],
              collective_axes=axis,
              leader_tracked=plgpu.CopyPartition.PARTITIONED(0)
              if config.collective
              else None,
          )
          plgpu.copy_gmem_to_smem(
              b.at[at, cols],
              b_smem.at[stage],
              full.at[stage],
              collective_axes=axis,
              leader_tracked=plgpu.CopyPartition.PARTITIONED(1)
              if config.collective
              else None,
          )

      num_steps = num_tiles * tiles.k

      @pl.loop(lax.max(num_steps - num_stages, 0), num_steps)
      def _tail(step):
        plgpu.barrier_wait(empty.at[lax.rem(step, num_stages)])

    def multiply():

      @pl.loop(0, num_tiles)
      def _tile(tile):
        acc = lax.rem(tile, num_accs)

        @pl.when(tile >= num_accs)
        def _acquire():
          plgpu.barrier_wait(acc_empty.at[acc])

        @pl.when(block == 0)
        def _leader():

          @pl.loop(0, tiles.k)
          def _step(k):
            stage = lax.rem(tile * tiles.k + k, num_stages)
            plgpu.barrier_wait(full.at[stage])
            plgpu.tcgen05_mma(
                acc_tmem.at[:, pl.ds(acc * config.mma_n, config.mma_n)],
                a_smem.at[stage],
                b_smem.at[stage],
                accumulate=k > 0,
                collective_axis=axis,
            )
            plgpu.tcgen05_commit_arrive(empty.at[stage], collective_axis=axis)

          plgpu.tcgen05_commit_arrive(acc_full.at[acc], collective_axis=axis)

      @pl.loop(lax.max(num_tiles - num_accs, 0), num_tiles)
      def _tail(tile):
        plgpu.barrier_wait(acc_empty.at[lax.rem(tile, num_accs)])

    @pl.when(warpgroup == 0)
    def _warps():

      @plgpu.warp_map
      def _of_warp(warp):
        pl.when(warp == 0)(load)
        pl.when(warp == 1)(multiply)

    @pl.when(warpgroup == 1)
    def _epilogue():

      @pl.loop(0, num_tiles)
      def _tile(tile):
        m, n = tiles.index(tile, cluster, config)
        rows = pl.ds(m * config.mma_m + block * config.tile_m, config.tile_m)
        acc = lax.rem(tile, num_accs)
        plgpu.barrier_wait(acc_full.at[acc])

        def release():
          plgpu.wait_load_tmem()
          plgpu.barrier_arrive(acc_empty.at[acc])

        blackwell_tiles.store(
            acc_tmem.at[:, pl.ds(acc * config.mma_n, config.mma_n)],
            c, c_smem, rows, n * config.mma_n, config,
            release=release,
        )

      plgpu.wait_smem_to_gmem(0)

  return blackwell_tiles.launch(
      blackwell_gemm, specs(config=config, dtype=dtype), tiles, config, dtype,
      interpret,
  )
