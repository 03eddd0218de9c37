"""A matrix product on Blackwell's tensor cores, by blocks or pairs of blocks.

`c = a @ b` with float16 or bfloat16 operands, added up in float32. Each
cluster, one block or (`collective`) two, works on tiles of `c`, one after the
other, until none are left: clusters stay, as many as the GPU holds at a time.
In a block

  warpgroup 0, warp 0   loads tiles of `a`, `b` by TMA         -> ring (SMEM)
  warpgroup 0, warp 1   issues MMAs                    ring    -> acc  (TMEM)
  warpgroup 1           casts, and stores by TMA       acc     -> `c`

  ring   step     0  1  2  3  4  5 ...  k / tile_k for each tile of `c`; goes on
         stage    0  1  2  3  0  1      from tile to tile (num_stages = 4)
  acc    tile     0           1  ...    accumulator 0, 1, 0, 1, ...: one is read
         stage    0           1         while the tensor core fills the other

A pair of blocks shares one MMA of 256 rows: each block has half of the rows of
`a` and half of the columns of `b` in its SMEM, and half of the rows of the
accumulator in its TMEM. The first block of a cluster is the leader.

Protocol, for each stage of the ring:

  full    `Barrier(num_arrivals=2)`. Arrives: the two loads. In a pair the loads
          are partitioned and tracked by the leader: both blocks start them, and
          the leader's barrier alone counts the bytes of both halves.
          Waits: the MMA warp (the leader's).
  empty   `Barrier(orders_tensor_core=True)`. Arrives: the tensor core, once it
          has done the step's MMA, in both blocks of a pair; the MMA warp
          commits, and does not wait for it.
          Waits: the TMA warp of each block, from the second lap on, and in its
          tail.

and for each accumulator:

  full    `Barrier(orders_tensor_core=True)`. Arrives: the tensor core, once it
          has done the last MMA of a tile, in both blocks of a pair.
          Waits: the epilogue warpgroup of each block.
  empty   `Barrier`, in a pair `ClusterBarrier`, with `orders_tensor_core=True`.
          Arrives: the epilogue of each block, once its loads from TMEM are
          done.
          Waits: the MMA warp of each block, from its third tile on, and in its
          tail.

Why it is race free:
  * TMA writes a stage only after the MMA that read it is done, in both blocks.
  * The tensor core overwrites an accumulator (the first MMA of a tile does not
    accumulate) only after the epilogues of both blocks have its values.
  * `c_smem` belongs to the epilogue: before it writes one half, at most the
    store from the other one is still reading; `commit_smem` orders the writes
    before the store.
  * No completion is missed: whoever waits for a barrier waits for each of its
    completions, the tails for the last ones. So no block leaves while the
    peer's tensor core reads its SMEM, or arrivals of the peer are under way.
  * No deadlock: step s waits for step s - num_stages alone, and tile t for tile
    t - 2; the epilogue waits for nobody but the tensor core.

GPU interpret mode (JAX 0.11 and later) runs and checks the kernel for one
block; it has no collective MMA, and none of tcgen05 on JAX 0.10.2. What it
cannot see are the warps' single threads, and the ordering of TMEM loads across
a cluster.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np

from jax_mgpu_ext.check import kernel_case
from jax_mgpu_ext.kernels import blackwell_tiles
from jax_mgpu_ext.kernels.blackwell_tiles import GemmConfig
from jax_mgpu_ext.specs import AccumulatorRing
from jax_mgpu_ext.specs import RingBuffer
from jax_mgpu_ext.specs import TiledSMEM


def specs(*, config: GemmConfig = GemmConfig(), dtype=jnp.float16) -> list:
  """Returns the scratch types of the kernel, for `plgpu.kernel`."""
  swizzle = plgpu.find_swizzle(
      config.tile_k * jnp.dtype(dtype).itemsize * 8
  )
  pair = plgpu.CopyPartition.PARTITIONED
  ring = RingBuffer(
      dict(
          a=TiledSMEM((config.tile_m, config.tile_k), dtype, swizzle=swizzle),
          b=TiledSMEM((config.tile_k, config.tile_n), dtype, swizzle=swizzle),
      ),
      config.num_stages,
      consumer_reads="tcgen05",
      collective_axes="x" if config.collective else None,
      leader_tracked=dict(a=pair(0), b=pair(1)) if config.collective else None,
  )
  acc = AccumulatorRing(
      plgpu.TMEM(
          (config.tile_m, config.mma_n), jnp.float32,
          collective=config.collective,
      ),
      config.num_accumulators,
      collective_axis="x" if config.collective else None,
  )
  c_smem = TiledSMEM((2, config.tile_m, config.epilogue_tile_n), dtype)
  return [ring, acc, c_smem]


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
  """Builds the kernel.

  Args:
    m: Rows of `a` and `c`, a multiple of those of the cluster's tile.
    n: Columns of `b` and `c`, a multiple of those of the cluster's tile.
    k: Columns of `a` and rows of `b`, a multiple of `tile_k`.
    config: What can be tuned.
    dtype: Element type of `a`, `b` and `c`: float16 or bfloat16.
    num_clusters: How many clusters are launched; None: as many as the GPU runs
      at a time, or as there are tiles, if these are fewer.
    interpret: As `interpret` of `plgpu.kernel`; None compiles for the GPU.

  Returns:
    A jitted function of `a`, of shape `(m, k)`, and `b`, `(k, n)`, that returns
    `c`, `(m, n)`.

  Raises:
    ValueError: If shapes, type and configuration do not fit each other.
  """
  tiles = blackwell_tiles.tiles_of(m, n, k, dtype, config, num_clusters)
  axis = "x" if config.collective else None

  def blackwell_gemm(a, b, c, ring, acc, c_smem):
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
          ring.producer_acquire(step)
          ring.copy_in(dict(a=a.at[rows, at], b=b.at[at, cols]), step=step)

      ring.producer_tail(num_tiles * tiles.k)

    def multiply():

      @pl.loop(0, num_tiles)
      def _tile(tile):
        acc.producer_acquire(tile)

        @pl.when(block == 0)
        def _leader():

          @pl.loop(0, tiles.k)
          def _step(k):
            step = tile * tiles.k + k
            stage = ring.consumer_wait(step)
            plgpu.tcgen05_mma(
                acc.stage(tile), stage["a"], stage["b"],
                accumulate=k > 0, collective_axis=axis,
            )
            ring.consumer_release(step)

          acc.producer_commit(tile)

      acc.producer_tail(num_tiles)

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
        values = acc.consumer_wait(tile)
        blackwell_tiles.store(
            values, c, c_smem, rows, n * config.mma_n, config,
            release=lambda: acc.consumer_release(tile),
        )

      plgpu.wait_smem_to_gmem(0)

  return blackwell_tiles.launch(
      blackwell_gemm, specs(config=config, dtype=dtype), tiles, config, dtype,
      interpret,
  )


def make_inputs(
    rng: np.random.Generator, *, m=1024, n=1024, k=512, dtype=jnp.float16
) -> tuple[np.ndarray, np.ndarray]:
  """Draws small whole numbers, so that sums are exact in float32."""
  a = rng.integers(-2, 3, (m, k)).astype(dtype)
  b = rng.integers(-2, 3, (k, n)).astype(dtype)
  return a, b


def reference(a: np.ndarray, b: np.ndarray) -> np.ndarray:
  """What the kernel computes, rounded once at the end."""
  return (a.astype(np.float32) @ b.astype(np.float32)).astype(a.dtype)


kernel_case(
    name="blackwell_gemm",
    inputs=make_inputs,
    reference=reference,
    specs=specs,
    targets=("b200", "b300"),
    params={
        "two_blocks": dict(m=512, n=512, k=320),
        "one_block": dict(
            m=256, n=128, k=96, dtype=jnp.bfloat16,
            config=GemmConfig(
                collective=False, tile_n=64, tile_k=32, num_stages=2,
                epilogue_tile_n=32,
            ),
            num_clusters=1,
        ),
    },
)(make_kernel)
