"""The kernel `split_k_gemm`, with JAX's own specs, written out.

It computes what `jax_mgpu_ext.kernels.split_k_gemm` does, whose docstring
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

from jax_mgpu_ext.kernels import split_k_gemm as spec_version
from jax_mgpu_ext.kernels.by_hand.cluster_softmax import barrier_of_cluster
from jax_mgpu_ext.kernels.by_hand.cluster_softmax import tile_transforms


def specs(
    *, num_blocks=2, num_stages=4, tile=(128, 128, 64), dtype=jnp.float16
) -> list:
  """Returns the scratch types of the kernel, for `plgpu.kernel`."""
  tile_m, tile_n, tile_k = tile
  swizzle = spec_version.swizzle_of(tile, dtype)
  operand_transforms = (
      plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize)),
      plgpu.SwizzleTransform(swizzle),
  )
  part = (tile_m, tile_n // num_blocks)
  return [
      plgpu.SMEM(
          (num_stages, tile_m, tile_k), dtype, transforms=operand_transforms
      ),
      plgpu.SMEM(
          (num_stages, tile_k, tile_n), dtype, transforms=operand_transforms
      ),
      plgpu.Barrier(num_arrivals=2, num_barriers=num_stages),
      plgpu.Barrier(num_arrivals=1, num_barriers=num_stages),
      [
          plgpu.SMEM(
              part,
              jnp.float32,
              transforms=tile_transforms(part[1], jnp.float32),
          )
          for _ in range(num_blocks)
      ],
      plgpu.SMEM(part, dtype, transforms=tile_transforms(part[1], dtype)),
      barrier_of_cluster(num_blocks),
      barrier_of_cluster(num_blocks),
  ]


def make_kernel(
    *,
    m: int = 128,
    n: int = 256,
    k: int = 1024,
    num_blocks: int = 2,
    num_stages: int = 4,
    tile=(128, 128, 64),
    dtype=jnp.float16,
    interpret=None,
) -> Callable[[jax.Array, jax.Array], jax.Array]:
  """Builds the kernel; arguments and result as in the spec version."""
  tile_m, tile_n, tile_k = spec_version.check_arguments(
      m, n, k, num_blocks, num_stages, tile, dtype
  )
  steps = k // tile_k // num_blocks
  # How many wgmmas may be under way when a stage is given back.
  under_way = 1 if num_stages > 1 else 0

  def split_k_gemm(
      a, b, y, a_smem, b_smem, full, empty, parts, y_smem, posted, read
  ):
    block = lax.axis_index("block")
    warpgroup = lax.axis_index("warpgroup")
    rows = pl.ds(lax.axis_index("m") * tile_m, tile_m)
    first_col = lax.axis_index("n") * tile_n

    @pl.when(warpgroup == 0)
    def _producer():

      @pl.loop(0, steps)
      def _fill(step):
        at = pl.ds((block * steps + step) * tile_k, tile_k)
        cols = pl.ds(first_col, tile_n)
        stage = lax.rem(step, num_stages)

        @pl.when(step >= num_stages)
        def _acquire():
          plgpu.barrier_wait(empty.at[stage])

        plgpu.copy_gmem_to_smem(
            a.at[rows, at], a_smem.at[stage], full.at[stage]
        )
        plgpu.copy_gmem_to_smem(
            b.at[at, cols], b_smem.at[stage], full.at[stage]
        )

      @pl.loop(max(0, steps - num_stages), steps)
      def _tail(step):
        plgpu.barrier_wait(empty.at[lax.rem(step, num_stages)])

    @pl.when(warpgroup == 1)
    def _consumer():

      def multiply(acc):

        @pl.loop(0, steps)
        def _drain(step):
          stage = lax.rem(step, num_stages)
          plgpu.barrier_wait(full.at[stage])
          plgpu.wgmma(acc, a_smem.at[stage], b_smem.at[stage])
          plgpu.wgmma_wait(under_way)

          @pl.when(step >= under_way)
          def _release():
            plgpu.barrier_arrive(
                empty.at[lax.rem(step - under_way, num_stages)]
            )

        total = acc[...]  # Waits for the last wgmma.
        if under_way:
          plgpu.barrier_arrive(empty.at[(steps - 1) % num_stages])
        return total

      spec_version.post(
          pl.run_scoped(multiply, plgpu.ACC((tile_m, tile_n), jnp.float32)),
          parts,
      )
      plgpu.commit_smem()
      plgpu.barrier_arrive(posted)
      plgpu.barrier_wait(posted)
      spec_version.add_up(block, parts, y_smem)
      plgpu.commit_smem()
      plgpu.barrier_arrive(read)

      width = tile_n // num_blocks
      plgpu.copy_smem_to_gmem(
          y_smem, y.at[rows, pl.ds(first_col + block * width, width)]
      )
      plgpu.barrier_wait(read)
      plgpu.wait_smem_to_gmem(0)

  return jax.jit(
      plgpu.kernel(
          split_k_gemm,
          out_type=jax.ShapeDtypeStruct((m, n), dtype),
          scratch_types=specs(
              num_blocks=num_blocks,
              num_stages=num_stages,
              tile=(tile_m, tile_n, tile_k),
              dtype=dtype,
          ),
          grid=(m // tile_m, n // tile_n),
          grid_names=("m", "n"),
          cluster=(num_blocks,),
          cluster_names=("block",),
          num_threads=2,
          thread_name="warpgroup",
          interpret=interpret,
      )
  )
