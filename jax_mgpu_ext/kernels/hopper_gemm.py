"""A Hopper GEMM: a ring of stages, wgmma, and multicast in clusters of two.

  y = a @ b      a: (m, k), b: (k, n), y: (m, n), added up in float32

Threads of a block: warpgroup 2 is the producer, warpgroups 0 and 1 are the two
consumers, which share an output tile along M or N. All are persistent: cluster
c of `num_clusters` computes the tiles c, c + num_clusters, ... of a path that
snakes through `y`. A step is one `tile_k` of one output tile. Steps are counted
through all tiles of a block, so that the producer fills stages for the next
tile while the consumers still store the last one:

  tile         0               1               2
  k            0   1   2   3   0   1   2   3   0   ...    (4 steps a tile)
  step         0   1   2   3   4   5   6   7   8   ...
  stage        0   1   2   0   1   2   0   1   2   ...    (num_stages = 3)
  producer     first lap   waits for `empty`: the release of three steps ago

In a cluster of two blocks along M, both need the same tile of `b` (along N: of
`a`): each fetches half of it, for both, by one multicast copy.

Protocol, for each stage (the barriers are those of `specs.RingBuffer`):

  full    Local, 2 arrivals. Arrives: the copy of `a` and the copy of `b`, when
          all bytes of the stage are there, also those that the peer fetched.
          Waits: each consumer, every step.
  empty   Of the cluster where there is multicast, else local. Arrives: both
          consumers, in both blocks, once no wgmma reads the stage any more.
          Waits: the producer, from its second lap on, and in its tail.

A consumer starts the wgmma of a step, waits until at most that one is under
way, and then gives the stage of the step before back, so the tensor core always
has work. With a single stage it waits for its own wgmma.

Why it is race free:
  * The producer's multicast writes into the peer's stage, too. Its wait for
    `empty` covers that, since the peer's consumers arrive there as well.
  * wgmma reads SMEM as TMA writes it (async proxy), so that after `wgmma_wait`
    an arrival is enough; no fence is needed. In a cluster one CUDA thread
    arrives for its warpgroup after its own wait, as in JAX's own pipeline.
  * Each stage is given back once a step, also the last one of a tile: its wgmma
    is over when the accumulator has been read.
  * The tail waits for the last releases of all stages, so no block leaves while
    its peer arrives at it, or while its half of a multicast is under way.
  * No deadlock: step s waits for the release of step s - num_stages. A consumer
    holds two stages at most, and one where there is no second one. Both blocks
    of a cluster make the same steps.
  * `out` belongs to the consumers, a half to each. `commit_smem` stands between
    the stores of all 128 threads and the TMA store of one, and the wait before
    a part is written again covers the store that read it.

GPU interpret mode carries out a wgmma at once, so it cannot see a stage that is
given back too early; and a multicast as a load by each block for itself, so it
cannot see writes into the peer's stage. It checks all waits and arrivals, but
since JAX 0.12 not that the tail is there.
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

from jax_mgpu_ext import specs as composite
from jax_mgpu_ext.check import kernel_case
from jax_mgpu_ext.kernels import gemm_tiles
from jax_mgpu_ext.kernels.gemm_tiles import GemmConfig


@composite.scratch_struct
class Scratch:
  """The ring of operands, and the parts of the output on their way to GMEM."""

  ring: Any
  out: Any


def specs(
    *,
    config: GemmConfig = GemmConfig(),
    dtype: Any = jnp.float16,
    out_dtype: Any = None,
    b_k_major: bool = False,
) -> Scratch:
  """Returns the scratch types of the kernel, for `plgpu.kernel`."""
  block_m, block_n = config.block_tile
  part = config.epilogue_tile_m, config.epilogue_tile_n
  b_tile = (block_n, config.tile_k) if b_k_major else (config.tile_k, block_n)
  # wgmma wants one swizzle for both operands.
  swizzle = plgpu.find_swizzle(config.tile_k * jnp.dtype(dtype).itemsize * 8)
  return Scratch(
      ring=composite.RingBuffer(
          dict(
              a=composite.TiledSMEM((block_m, config.tile_k), dtype),
              b=composite.TiledSMEM(b_tile, dtype, swizzle=swizzle),
          ),
          config.num_stages,
          num_consumers=2,
          collective_axes=dict(
              a="block" if config.cluster_dimension == "n" else None,
              b="block" if config.cluster_dimension == "m" else None,
          ),
      ),
      out=composite.TiledSMEM(
          (2, config.num_parts, *part),
          gemm_tiles.out_dtype_of(dtype, out_dtype),
      ),
  )


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
  """Builds the kernel.

  Args:
    m: Rows of `a` and `y`, a multiple of those of the cluster's tile.
    n: Columns of `b` and `y`, a multiple of those of the cluster's tile.
    k: Columns of `a` and rows of `b`, a multiple of `tile_k`.
    config: What can be tuned.
    dtype: Element type of `a` and `b`: float16, bfloat16, or one of
      float8_e4m3fn and float8_e5m2, for which `b` must be K-major.
    out_dtype: Element type of `y`; None: `dtype`, or bfloat16 for a float8.
    b_k_major: Whether `b` comes as `(n, k)`, that is, transposed.
    num_clusters: How many clusters are launched; None: as many as the GPU runs
      at a time, or as there are tiles, if these are fewer.
    interpret: As `interpret` of `plgpu.kernel`; None compiles for the GPU.

  Returns:
    A jitted function of `a`, of shape `(m, k)`, and `b`, `(k, n)` or `(n, k)`,
    that returns `y`, `(m, n)`.

  Raises:
    ValueError: If shapes, types and configuration do not fit each other.
  """
  gemm_tiles.check_problem(
      m=m, n=n, k=k, config=config, dtype=dtype, out_dtype=out_dtype,
      b_k_major=b_k_major, num_clusters=num_clusters,
  )
  tile_k, steps_per_tile = config.tile_k, k // config.tile_k
  # How many wgmmas may be under way when a stage is given back.
  under_way = 1 if config.num_stages > 1 else 0

  def hopper_gemm(a, b, y, scratch):
    ring = scratch.ring
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
          ring.producer_acquire(step)
          ring.copy_in(dict(a=a.at[rows, at], b=b_tile), step=step)

      ring.producer_tail(gemm_tiles.num_steps(m, n, k, config))

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
            stage = ring.consumer_wait(first + i)
            if b_k_major:
              b_mine = stage["b"].at[mine_n].transpose((1, 0))
            else:
              b_mine = stage["b"].at[:, mine_n]
            plgpu.wgmma(acc, stage["a"].at[mine_m], b_mine)
            plgpu.wgmma_wait(under_way)

            @pl.when(i >= under_way)
            def _release():
              ring.consumer_release(first + i - under_way)

          tile = acc[...]  # Waits for the last wgmma.
          if under_way:
            ring.consumer_release(first + steps_per_tile - 1)
          y_tile = y.at[rows, cols].at[mine_m, mine_n]
          out = scratch.out.at[warpgroup]
          gemm_tiles.store_tile(tile, out, y_tile, config)

        pl.run_scoped(
            multiply, plgpu.ACC((config.tile_m, config.tile_n), jnp.float32)
        )

      plgpu.wait_smem_to_gmem(0)

  return gemm_tiles.launch(
      hopper_gemm,
      [specs(
          config=config, dtype=dtype, out_dtype=out_dtype, b_k_major=b_k_major
      )],
      m=m, n=n, config=config,
      out_dtype=gemm_tiles.out_dtype_of(dtype, out_dtype),
      num_clusters=num_clusters, interpret=interpret,
  )


def make_inputs(
    rng: np.random.Generator,
    *,
    m: int = 1024,
    n: int = 1024,
    k: int = 512,
    dtype: Any = jnp.float16,
    b_k_major: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
  """Draws small whole numbers, so that sums in float32 are exact."""
  a = rng.integers(-2, 3, (m, k)).astype(dtype)
  b = rng.integers(-2, 3, (n, k) if b_k_major else (k, n)).astype(dtype)
  return a, b


def reference(
    a: np.ndarray,
    b: np.ndarray,
    *,
    out_dtype: Any = None,
    b_k_major: bool = False,
) -> np.ndarray:
  """What the kernel computes: the product, rounded once, at the end."""
  b = b.T if b_k_major else b
  product = a.astype(np.float32) @ b.astype(np.float32)
  return product.astype(gemm_tiles.out_dtype_of(a.dtype, out_dtype))


# None with a K-major `b`, as a float8 wants it: the interpreter of JAX 0.10.2
# cannot transpose refs, and waits for ever.
_SMALL = dict(tile_m=64, tile_n=64, epilogue_tile_n=32)
kernel_case(
    name="hopper_gemm",
    inputs=make_inputs,
    reference=reference,
    specs=specs,
    targets=("h100", "h200"),
    params={
        "f16_cluster_m": dict(
            m=256, n=256, k=320,
            config=GemmConfig(cluster_dimension="m", num_stages=3, **_SMALL),
            num_clusters=1,
        ),
        "f16_cluster_n": dict(
            m=256, n=256, k=128, out_dtype=jnp.float32,
            config=GemmConfig(
                cluster_dimension="n", wg_dimension="m", num_stages=1, **_SMALL
            ),
        ),
        "bf16_alone": dict(
            m=128, n=384, k=128, dtype=jnp.bfloat16,
            config=GemmConfig(num_stages=4, grid_minor_dim="m", **_SMALL),
            num_clusters=2,
        ),
    },
)(make_kernel)
