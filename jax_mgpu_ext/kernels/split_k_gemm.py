"""A Hopper GEMM for long K: the blocks of a cluster share K, and add up.

  y = a @ b      a: (m, k), b: (k, n), y: (m, n), added up in float32

A cluster of 1, 2 or 4 blocks computes one tile of `y`. Block `i` multiplies its
part of K, `steps` steps of `tile_k`, into an accumulator of the whole tile;
then each block adds up, over all blocks, one slice of the columns, and stores
it:

  block            0                1
  multiplies       k = 0 ... k/2    k = k/2 ... k    (whole tile, in registers)
  posts            slices 0, 1      slices 0, 1      (in its own SMEM)
  reads and adds   slice 0 of all   slice 1 of all   (out of the SMEM of all)
  stores           y[:, slice 0]    y[:, slice 1]

All add up in the order of the blocks, so the result does not depend on chance.

Warpgroup 0 is the producer of a ring of stages, warpgroup 1 the consumer.

Protocol of the ring, local to the block:

  full    2 arrivals: the copy of `a` and the copy of `b`. The consumer waits,
          every step.
  empty   The consumer arrives, once no wgmma reads the stage any more, which is
          one step late (with a single stage, at once). The producer waits, from
          its second lap on, and in its tail.

Protocol of `posts`, a `BarrierPair` of two `ClusterBarrier`s (in a cluster of
one, of two `Barrier`s); each gets one arrival of each block, once in all:

  full    The posts of all blocks are there. Arrives: the consumer of each
          block, at all blocks of the cluster, once its own posts lie in SMEM.
          Waits: the same consumer, before it reads.
  empty   All have read the posts of this block. Arrives: the consumer of each
          block, at all blocks, after it has read. Waits: the same consumer,
          before it leaves.

Why it is race free:
  * wgmma reads SMEM in the same way as TMA writes it (async proxy), so after
    `wgmma_wait` an arrival on the ring's `empty` is enough; no fence is needed.
    The last stage is released when the accumulator is read, which waits for its
    wgmma.
  * Posts are written once, and read after the wait for `full`, which needs the
    arrival of the block that wrote them.
  * `commit_smem` stands between the stores, or loads, of all 128 threads and
    the arrival on `posts`: it makes all of them wait for each other, while the
    arrival itself is made by one thread a signalled block and waits for nobody.
  * The wait for `posts.empty`: a block does not leave while others still read
    its SMEM, or while one of their arrivals is under way.
  * `y_smem` is written once, and stored by TMA after `commit_smem`.
  * No deadlock: step s waits for the release of step s - num_stages, and the
    consumer holds at most two stages, one if there is no second one. All blocks
    arrive at `posts` without waiting for anything but their own ring.

The scope of remote arrivals, and which refs JAX 0.11.2 can read from another
block, are those of `cluster_softmax`. The latter is why each slice is a ref of
its own, and why the code that reads is there once for each.

The interpreter cannot see into the SMEM of another block; the tests teach it
to. It carries a wgmma out at once, so it cannot see a stage that is given back
too early.
"""

from __future__ import annotations

from collections.abc import Callable
import functools
import operator

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np

from jax_mgpu_ext.check import kernel_case
from jax_mgpu_ext.kernels.cluster_softmax import load, posts_of_cluster
from jax_mgpu_ext.kernels.tiles import check_count
from jax_mgpu_ext.specs import RingBuffer, TiledSMEM

_DTYPES = (jnp.dtype(jnp.float16), jnp.dtype(jnp.bfloat16))
_CLUSTERS = (1, 2, 4)
# Mosaic keeps the phases of one barrier array in the bits of an int32.
_MAX_STAGES = 32
# wgmma takes 64 rows at a time, at most 256 columns, and 16 elements of K (PTX
# ISA, "Matrix shape" of wgmma).
_WGMMA_M, _WGMMA_K, _MAX_WGMMA_N = 64, 16, 256
# Columns of a slice: the narrowest swizzle, in elements of 2 bytes.
_SLICE_N = 16
# Bytes of a row of a swizzled tile; wgmma wants one swizzle for both operands.
_SWIZZLES = (128, 64, 32)


def specs(
    *, num_blocks=2, num_stages=4, tile=(128, 128, 64), dtype=jnp.float16
) -> list:
  """Returns the scratch types of the kernel, for `plgpu.kernel`."""
  tile_m, tile_n, tile_k = tile
  swizzle = swizzle_of(tile, dtype)
  stage = dict(
      a=TiledSMEM((tile_m, tile_k), dtype, swizzle=swizzle),
      b=TiledSMEM((tile_k, tile_n), dtype, swizzle=swizzle),
  )
  part = (tile_m, tile_n // num_blocks)
  return [
      RingBuffer(stage, num_stages),
      [TiledSMEM(part, jnp.float32) for _ in range(num_blocks)],
      TiledSMEM(part, dtype),
      posts_of_cluster(num_blocks),
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
  """Builds the kernel.

  Args:
    m: Rows of `a` and `y`, a multiple of `tile_m`.
    n: Columns of `b` and `y`, a multiple of `tile_n`.
    k: Columns of `a` and rows of `b`, a multiple of `num_blocks * tile_k`.
    num_blocks: Blocks of a cluster, which share K: 1, 2 or 4.
    num_stages: Stages of the ring, 1 to 32; may exceed the steps of a block.
    tile: `tile_m` and `tile_n`, rows and columns of the tile of a cluster, and
      `tile_k`, the length of a step along K, in elements.
    dtype: Element type of `a`, `b` and `y`: float16 or bfloat16.
    interpret: As `interpret` of `plgpu.kernel`; None compiles for the GPU.

  Returns:
    A jitted function of `a` and `b` that returns `y`.

  Raises:
    ValueError: If shapes, types and tile do not fit each other.
  """
  tile_m, tile_n, tile_k = check_arguments(
      m, n, k, num_blocks, num_stages, tile, dtype
  )
  steps = k // tile_k // num_blocks
  # How many wgmmas may be under way when a stage is given back.
  under_way = 1 if num_stages > 1 else 0

  def split_k_gemm(a, b, y, ring, parts, y_smem, posts):
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
        ring.producer_acquire(step)
        ring.copy_in(dict(a=a.at[rows, at], b=b.at[at, cols]), step=step)

      ring.producer_tail(steps)

    @pl.when(warpgroup == 1)
    def _consumer():

      def multiply(acc):

        @pl.loop(0, steps)
        def _drain(step):
          stage = ring.consumer_wait(step)
          plgpu.wgmma(acc, stage["a"], stage["b"])
          plgpu.wgmma_wait(under_way)

          @pl.when(step >= under_way)
          def _release():
            ring.consumer_release(step - under_way)

        total = acc[...]  # Waits for the last wgmma.
        if under_way:
          ring.consumer_release(steps - 1)
        return total

      post(
          pl.run_scoped(multiply, plgpu.ACC((tile_m, tile_n), jnp.float32)),
          parts,
      )
      plgpu.commit_smem()
      plgpu.barrier_arrive(posts.full)
      plgpu.barrier_wait(posts.full)
      add_up(block, parts, y_smem)
      plgpu.commit_smem()
      plgpu.barrier_arrive(posts.empty)

      width = tile_n // num_blocks
      plgpu.copy_smem_to_gmem(
          y_smem, y.at[rows, pl.ds(first_col + block * width, width)]
      )
      plgpu.barrier_wait(posts.empty)
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


def post(total: jax.Array, parts) -> None:
  """Stores the slices of an accumulator in one's own SMEM."""
  width = total.shape[1] // len(parts)
  for index, part in enumerate(parts):
    part[...] = total[:, index * width : (index + 1) * width]


def add_up(block, parts, y_smem) -> None:
  """Adds up one's own slice over all blocks, in their order, into `y_smem`."""
  for index, part in enumerate(parts):

    @pl.when(block == index)
    def _mine(part=part):
      refs = [part]
      if len(parts) > 1:
        refs = [
            plgpu.cluster_ref(part, {"block": jnp.int32(other)})
            for other in range(len(parts))
        ]
      values = [load(ref, plgpu.Layout.WGMMA) for ref in refs]
      y_smem[...] = functools.reduce(operator.add, values).astype(y_smem.dtype)


def swizzle_of(tile, dtype) -> int:
  """Returns the widest swizzle that fits both operands, in bytes; 0: none."""
  itemsize = jnp.dtype(dtype).itemsize
  return next(
      (s for s in _SWIZZLES if not any(d * itemsize % s for d in tile[1:])), 0
  )


def check_arguments(
    m, n, k, num_blocks, num_stages, tile, dtype
) -> tuple[int, int, int]:
  """Returns the three sizes of a tile as integers.

  Raises:
    ValueError: As of `make_kernel`.
  """
  check_count(m=m, n=n, k=k, num_stages=num_stages)
  if num_stages > _MAX_STAGES:
    raise ValueError(
        f"Expected at most {_MAX_STAGES} stages, got {num_stages=}"
    )
  if num_blocks not in _CLUSTERS or isinstance(num_blocks, bool):
    raise ValueError(f"Expected 1, 2 or 4 blocks, got {num_blocks=}")
  if jnp.dtype(dtype) not in _DTYPES:
    raise ValueError(
        f"Expected float16 or bfloat16, got dtype={jnp.dtype(dtype).name}"
    )
  try:
    tile_m, tile_n, tile_k = (operator.index(size) for size in tile)
  except (TypeError, ValueError):
    raise ValueError(
        f"Expected tile=(tile_m, tile_n, tile_k), got {tile=}"
    ) from None
  check_count(tile_m=tile_m, tile_n=tile_n, tile_k=tile_k)
  if tile_m % _WGMMA_M:
    raise ValueError(
        f"Expected tile_m in multiples of {_WGMMA_M}, got {tile=}"
    )
  if tile_n > _MAX_WGMMA_N or tile_n % (num_blocks * _SLICE_N):
    raise ValueError(
        f"Expected tile_n in multiples of {num_blocks * _SLICE_N}, which"
        f" {num_blocks} blocks can share, at most {_MAX_WGMMA_N}, got {tile=}"
    )
  if tile_k % _WGMMA_K:
    raise ValueError(
        f"Expected tile_k in multiples of {_WGMMA_K}, got {tile=}"
    )
  if not swizzle_of((tile_m, tile_n, tile_k), dtype):
    raise ValueError(
        f"Expected tile_n and tile_k in multiples of {_SWIZZLES[-1]} bytes, got"
        f" {tile=}"
    )
  for name, size, part in (
      ("m", m, tile_m), ("n", n, tile_n), ("k", k, num_blocks * tile_k)
  ):
    if size % part:
      raise ValueError(
          f"Expected {name} in multiples of {part}, got {name}={size} with"
          f" {tile=} and {num_blocks=}"
      )
  return tile_m, tile_n, tile_k


def make_inputs(
    rng: np.random.Generator, *, m=128, n=256, k=1024, dtype=jnp.float16
) -> tuple[np.ndarray, np.ndarray]:
  """Draws small whole numbers, whose products add up exactly in float32."""
  a = rng.integers(-4, 5, (m, k)).astype(dtype)
  b = rng.integers(-4, 5, (k, n)).astype(dtype)
  return a, b


def reference(a: np.ndarray, b: np.ndarray) -> np.ndarray:
  """What the kernel computes: exact sums, rounded once."""
  return (a.astype(np.float32) @ b.astype(np.float32)).astype(a.dtype)


kernel_case(
    name="split_k_gemm",
    inputs=make_inputs,
    reference=reference,
    specs=specs,
    targets=("h100", "h200"),
    params={
        "2_blocks": {},
        "4_blocks": dict(num_blocks=4, num_stages=3, dtype=jnp.bfloat16),
        "1_stage": dict(m=64, n=64, k=128, num_stages=1, tile=(64, 64, 32)),
    },
)(make_kernel)
