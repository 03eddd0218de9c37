"""The Hopper GEMM of `kernels.hopper_gemm`, with JAX's own specs, by hand.

It compiles to the same code. Both take what is not the ring from `gemm_tiles`.

Protocol, for each stage (warpgroup 2 is the producer, 0 and 1 are consumers):

  full    `Barrier(num_arrivals=2, num_barriers=num_stages)`, local.
          Arrives: the copy of `a` and the copy of `b`, when all bytes of the
          stage are there, also those that the peer fetched.
          Waits: each consumer, every step.
  empty   `ClusterBarrier(collective_axes=("block",), num_arrivals=2,
          num_barriers=num_stages)`; without a cluster a `Barrier`.
          Arrives: both consumers, in both blocks, once no wgmma reads the stage
          any more.
          Waits: the producer, from its second lap on, and in its tail.

Why it is race free, and what interpret mode cannot see: as there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from jax_mgpu_ext.kernels import gemm_tiles
from jax_mgpu_ext.kernels.gemm_tiles import GemmConfig


def specs(
    *,
    config: GemmConfig = GemmConfig(),
    dtype: Any = jnp.float16,
    out_dtype: Any = None,
    b_k_major: bool = False,
) -> list[Any]:
  """Returns the scratch types of the kernel, for `plgpu.kernel`."""
  num_stages = config.num_stages
  block_m, block_n = config.block_tile
  part = config.epilogue_tile_m, config.epilogue_tile_n
  out_dtype = gemm_tiles.out_dtype_of(dtype, out_dtype)
  b_tile = (block_n, config.tile_k) if b_k_major else (config.tile_k, block_n)
  # wgmma wants one swizzle for both operands.
  transforms = _transforms(config.tile_k, dtype)
  if config.cluster_dimension is None:
    empty = plgpu.Barrier(num_arrivals=2, num_barriers=num_stages)
  else:
    empty = plgpu.ClusterBarrier(
        collective_axes=("block",), num_arrivals=2, num_barriers=num_stages
    )
  return [
      plgpu.SMEM(
          (num_stages, block_m, config.tile_k), dtype, transforms=transforms
      ),
      plgpu.SMEM((num_stages, *b_tile), dtype, transforms=transforms),
      plgpu.Barrier(num_arrivals=2, num_barriers=num_stages),
      empty,
      plgpu.SMEM(
          (2, config.num_parts, *part),
          out_dtype,
          transforms=_transforms(config.epilogue_tile_n, out_dtype),
      ),
  ]


def _transforms(cols: int, dtype: Any) -> tuple[Any, ...]:
  """Returns the tiling and the swizzle for rows of so many elements."""
  itemsize = jnp.dtype(dtype).itemsize
  swizzle = plgpu.find_swizzle(cols * itemsize * 8)
  tiling = plgpu.TilingTransform((8, swizzle // itemsize))
  if swizzle == 16:  # None at all.
    return (tiling,)
  return tiling, plgpu.SwizzleTransform(swizzle)


def make_kernel(
    *,
    m: int = 1024,
    n: int = 1024,
    k: int = 512,
    config: GemmConfig = GemmConfig(),
    dtype: Any = jnp.float16,
    out_dtype: Any = None,
    b_k_major: bool = False,
    num_clusters: int | None = None,
    interpret: Any = None,
) -> Callable[[jax.Array, jax.Array], jax.Array]:
  """Builds the kernel; all as in `kernels.hopper_gemm`."""
  gemm_tiles.check_problem(
      m=m, n=n, k=k, config=config, dtype=dtype, out_dtype=out_dtype,
      b_k_major=b_k_major, num_clusters=num_clusters,
  )
  num_stages = config.num_stages
  tile_k, steps_per_tile = config.tile_k, k // config.tile_k
  # How many wgmmas may be under way when a stage is given back.
  under_way = 1 if num_stages > 1 else 0
  # In a cluster along M the blocks share `b`, along N they share `a`.
  multicast = dict(collective_axes="block")
  a_options = multicast if config.cluster_dimension == "n" else {}
  b_options = multicast if config.cluster_dimension == "m" else {}

  def body(a, b, y, a_smem, b_smem, full, empty, out):
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == 2)
    def _producer():
      plgpu.set_max_registers(
          gemm_tiles.PRODUCER_REGISTERS, action="decrease"
      )

      @gemm_tiles.for_each_tile(m, n, k, config)
      def _tile(rows, cols, first):

        @pl.loop(0, steps_per_tile)
        def _fill(i):
          at = pl.ds(i * tile_k, tile_k)
          b_tile = b.at[cols, at] if b_k_major else b.at[at, cols]
          step = first + i
          stage = lax.rem(step, num_stages)

          @pl.when(step >= num_stages)
          def _acquire():
            plgpu.barrier_wait(empty.at[stage])

          plgpu.copy_gmem_to_smem(
              a.at[rows, at], a_smem.at[stage], full.at[stage], **a_options
          )
          plgpu.copy_gmem_to_smem(
              b_tile, b_smem.at[stage], full.at[stage], **b_options
          )

      num_steps = gemm_tiles.num_steps(m, n, k, config)

      @pl.loop(lax.max(num_steps - num_stages, 0), num_steps)
      def _tail(step):
        plgpu.barrier_wait(empty.at[lax.rem(step, num_stages)])

    @pl.when(warpgroup < 2)
    def _consumer():
      plgpu.set_max_registers(
          gemm_tiles.CONSUMER_REGISTERS, action="increase"
      )
      mine_m, mine_n = gemm_tiles.share_of(warpgroup, config)

      @gemm_tiles.for_each_tile(m, n, k, config)
      def _tile(rows, cols, first):

        def multiply(acc):

          @pl.loop(0, steps_per_tile)
          def _drain(i):
            stage = lax.rem(first + i, num_stages)
            plgpu.barrier_wait(full.at[stage])
            if b_k_major:
              b_mine = b_smem.at[stage, mine_n].transpose((1, 0))
            else:
              b_mine = b_smem.at[stage, :, mine_n]
            plgpu.wgmma(acc, a_smem.at[stage, mine_m], b_mine)
            plgpu.wgmma_wait(under_way)

            @pl.when(i >= under_way)
            def _release():
              released = lax.rem(first + i - under_way, num_stages)
              plgpu.barrier_arrive(empty.at[released])

          tile = acc[...]  # Waits for the last wgmma.
          if under_way:
            last = lax.rem(first + steps_per_tile - 1, num_stages)
            plgpu.barrier_arrive(empty.at[last])
          y_tile = y.at[rows, cols].at[mine_m, mine_n]
          gemm_tiles.store_tile(tile, out.at[warpgroup], y_tile, config)

        pl.run_scoped(
            multiply, plgpu.ACC((config.tile_m, config.tile_n), jnp.float32)
        )

      plgpu.wait_smem_to_gmem(0)

  return gemm_tiles.launch(
      body,
      specs(
          config=config, dtype=dtype, out_dtype=out_dtype, b_k_major=b_k_major
      ),
      m=m, n=n, config=config,
      out_dtype=gemm_tiles.out_dtype_of(dtype, out_dtype),
      num_clusters=num_clusters, interpret=interpret,
  )
