"""Row softmax whose rows are split over the blocks of a cluster.

  y[r] = exp(x[r] - max(x[r])) / sum(exp(x[r] - max(x[r])))

Block `i` of a cluster of 1, 2 or 4 holds columns `i * cols` to `(i + 1) *
cols`; a step is one tile of `rows` rows of them. Warpgroup 0 is the producer
and loads the tiles into a ring, warpgroup 1 the consumer and does all the rest.
Per step it takes the maximum `m` of its part of each row, and the sum `l` of
exp(x - m), posts both in its own SMEM, and reads those of all blocks out of
theirs:

  max(x) = max(m_0, m_1, ...)        sum = l_0 * exp(m_0 - max(x)) + ...

All blocks add up in the same order, so a row is divided by the same sum in
each.

Protocol of the ring: as in `cluster_ring`, but for `empty`, which is local.

Protocol of `posts`, a `BarrierPair` of two `ClusterBarrier`s (in a cluster of
one, of two `Barrier`s); each gets one arrival of each block, a step:

  full    The posts of all blocks are there.
          Arrives: the consumer of each block, at all blocks of the cluster,
          once its own posts lie in SMEM.
          Waits: the same consumer, before it reads the posts.
  empty   The posts of this block may be overwritten.
          Arrives: the consumer of each block, at all blocks, after it read
          theirs.
          Waits: the consumer, from its second step on, before it posts; and
          once after the last step.

Why it is race free:
  * Posts are read after the wait for `full`, which needs the arrival of the
    block that wrote them, and are written after the wait for `empty`, which
    needs the arrivals of all that read them.
  * `commit_smem` stands between the stores, or loads, of all 128 threads and
    the arrival: it makes all of them wait for each other, while the arrival
    itself is made by one thread a signalled block and waits for nobody.
  * No completion is missed: `full` needs an arrival of each block, which comes
    after its wait for `empty`; and the other way round.
  * The wait after the last step: a block does not leave while others still read
    its SMEM, or while one of their arrivals is under way.
  * `y_smem` is the consumer's. `commit_smem` stands between its stores and the
    TMA store, and a wait for what TMA still reads before the next stores.
  * No deadlock: the producer waits for its own consumer only, and all consumers
    make the same steps.

Mosaic writes remote arrivals, and waits, without a scope, for which PTX takes
the block's; Pallas has no way to ask for the cluster's. CUTLASS's
`ClusterBarrier` writes them in the same way.

JAX 0.11.2 reads from another block's SMEM whole refs only, no slices of them;
so maxima and sums are two refs, and are not doubled to save the wait for
`empty`.

The interpreter cannot see into the SMEM of another block (no release can), so
it runs clusters of one only; the tests teach it to, and check values and races
of all of the above, but for the 128 CUDA threads of a warpgroup, for which one
stands.
"""

from __future__ import annotations

from collections.abc import Callable
import functools
import inspect
import operator

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np

from jax_mgpu_ext.check import kernel_case
from jax_mgpu_ext.kernels.tiles import check_count, check_tile
from jax_mgpu_ext.specs import BarrierPair, MaybeClusterBarrier
from jax_mgpu_ext.specs import RingBuffer, TiledSMEM

# wgmma's layout of registers: 4 threads share a row, so rows are reduced by two
# shuffles. It has 64 rows (PTX ISA, "wgmma.mma_async.m64nNk16: D fragment").
_ROWS_MULTIPLE = 64
# Mosaic keeps the phases of one barrier array in the bits of an int32.
_MAX_STAGES = 32
# The narrowest swizzle; JAX 0.10.2 loads no tiles without one.
_SWIZZLE_BYTES = 32
_CLUSTERS = (1, 2, 4)
_LOWEST = float(jnp.finfo(jnp.float32).min)
# JAX 0.10.2 wants the index apart from the ref.
_LOAD_NEEDS_INDEX = (
    inspect.signature(plgpu.load).parameters.get("idx", None) is not None
    and inspect.signature(plgpu.load).parameters["idx"].default
    is inspect.Parameter.empty
)


def specs(
    *, num_blocks=2, num_stages=2, tile=(64, 128), dtype=jnp.float32
) -> list:
  """Returns the scratch types of the kernel, for `plgpu.kernel`."""
  return [
      RingBuffer(TiledSMEM(tile, dtype), num_stages, consumer_reads="generic"),
      TiledSMEM(tile, dtype),
      plgpu.SMEM((tile[0],), jnp.float32),
      plgpu.SMEM((tile[0],), jnp.float32),
      posts_of_cluster(num_blocks),
  ]


def posts_of_cluster(num_blocks: int) -> BarrierPair:
  """Returns the barriers of an exchange between the blocks of a cluster."""
  barrier = MaybeClusterBarrier(
      collective_axes=("block",) if num_blocks > 1 else None,
      num_arrivals=1,
      num_barriers=1,
  )
  return BarrierPair(full=barrier, empty=barrier)


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
  """Builds the kernel.

  Args:
    num_blocks: Blocks of a cluster, which share each row: 1, 2 or 4.
    num_clusters: How many clusters are launched.
    num_steps: Tiles of each block.
    num_stages: Stages of the ring, 1 to 32; may exceed `num_steps`.
    tile: Rows and columns of one tile, in elements; rows a multiple of 64.
    dtype: Element type of input and output; computed in float32.
    interpret: As `interpret` of `plgpu.kernel`; None compiles for the GPU.

  Returns:
    A jitted function of an array of shape `(num_clusters * num_steps * rows,
    num_blocks * cols)` that returns an array of the same shape and type.

  Raises:
    ValueError: If a count is out of range or TMA could not move the tile.
  """
  rows, cols = check_arguments(
      num_blocks, num_clusters, num_steps, num_stages, tile, dtype
  )

  def cluster_softmax(x, y, ring, y_smem, maxima, totals, posts):
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
        ring.producer_acquire(step)
        ring.copy_in(tile_of(x, step), step=step)

      ring.producer_tail(num_steps)

    @pl.when(warpgroup == 1)
    def _consumer():

      @pl.loop(0, num_steps)
      def _step(step):
        value = load(ring.consumer_wait(step), plgpu.Layout.WGMMA)
        ring.consumer_release(step)
        exps, maximum, total = softmax_of_part(value.astype(jnp.float32))

        @pl.when(step > 0)
        def _reuse():
          plgpu.barrier_wait(posts.empty)

        maxima[...] = maximum
        totals[...] = total
        plgpu.commit_smem()
        plgpu.barrier_arrive(posts.full)
        plgpu.barrier_wait(posts.full)
        scale = scale_of_part(
            maximum,
            read_cluster(maxima, num_blocks),
            read_cluster(totals, num_blocks),
        )
        plgpu.commit_smem()
        plgpu.barrier_arrive(posts.empty)

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        y_smem[...] = (exps * over_rows(scale, exps.shape)).astype(dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(y_smem, tile_of(y, step))

      plgpu.barrier_wait(posts.empty)
      plgpu.wait_smem_to_gmem(0)

  return jax.jit(
      plgpu.kernel(
          cluster_softmax,
          out_type=out_type(
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


def check_arguments(
    num_blocks, num_clusters, num_steps, num_stages, tile, dtype
) -> tuple[int, int]:
  """Returns rows and columns of a tile as integers.

  Raises:
    ValueError: As of `make_kernel`.
  """
  check_count(
      num_clusters=num_clusters, num_steps=num_steps, num_stages=num_stages
  )
  if num_stages > _MAX_STAGES:
    raise ValueError(
        f"Expected at most {_MAX_STAGES} stages, got {num_stages=}"
    )
  if num_blocks not in _CLUSTERS or isinstance(num_blocks, bool):
    raise ValueError(f"Expected 1, 2 or 4 blocks, got {num_blocks=}")
  rows, cols = check_tile(tile, dtype)
  if rows % _ROWS_MULTIPLE:
    raise ValueError(
        f"Expected a multiple of {_ROWS_MULTIPLE} rows, got {tile=}"
    )
  if cols * jnp.dtype(dtype).itemsize % _SWIZZLE_BYTES:
    raise ValueError(
        f"Expected rows of a multiple of {_SWIZZLE_BYTES} bytes, got {tile=}"
    )
  return rows, cols


def out_type(num_blocks, num_clusters, num_steps, tile, dtype):
  """Returns the shape and type of input and output."""
  rows, cols = tile
  return jax.ShapeDtypeStruct(
      (num_clusters * num_steps * rows, num_blocks * cols), dtype
  )


def load(ref, layout) -> jax.Array:
  """Loads a ref into registers of a layout, on every release of JAX."""
  if _LOAD_NEEDS_INDEX:
    return plgpu.load(ref, (), layout=layout, optimized=False)
  return plgpu.load(ref, layout=layout, optimized=False)


def over_rows(value: jax.Array, shape) -> jax.Array:
  """Repeats a value a row along the columns."""
  return lax.broadcast_in_dim(value, shape, [0])


def read_cluster(ref, num_blocks: int) -> list[jax.Array]:
  """Reads the ref of each block, one's own included, in the same order in each.

  Args:
    ref: A value a row, in SMEM; not a part of a larger ref.
    num_blocks: Blocks of the cluster.
  """
  layout = plgpu.Layout.WGMMA.reduce(1)
  if num_blocks == 1:
    return [load(ref, layout)]
  return [
      load(plgpu.cluster_ref(ref, {"block": jnp.int32(block)}), layout)
      for block in range(num_blocks)
  ]


def softmax_of_part(value):
  """Returns exp(x - maximum), maximum and sum of a part of each row."""
  # Where a part of a row is -inf throughout, `x - maximum` must not be NaN.
  maximum = jnp.maximum(jnp.max(value, axis=1), _LOWEST)
  exps = jnp.exp(value - over_rows(maximum, value.shape))
  return exps, maximum, jnp.sum(exps, axis=1)


def scale_of_part(maximum, maxima, totals):
  """Returns what a part's exponentials are to be multiplied by.

  Args:
    maximum: The maximum of the part, of each row.
    maxima: Those of all parts.
    totals: Their sums of exp(x - maximum).
  """
  highest = functools.reduce(jnp.maximum, maxima)
  total = functools.reduce(
      operator.add, (t * jnp.exp(m - highest) for m, t in zip(maxima, totals))
  )
  return jnp.exp(maximum - highest) / total


def make_inputs(
    rng: np.random.Generator,
    *,
    num_blocks=2,
    num_clusters=1,
    num_steps=4,
    tile=(64, 128),
    dtype=jnp.float32,
) -> tuple[np.ndarray]:
  """Draws values whose maximum differs much between the parts of a row."""
  shape = (num_clusters * num_steps * tile[0], num_blocks, tile[1])
  x = rng.normal(size=shape) * 4 + rng.normal(size=(*shape[:2], 1)) * 16
  return (x.reshape(shape[0], -1).astype(dtype),)


def reference(x: np.ndarray) -> np.ndarray:
  """What the kernel computes, in float64."""
  exps = x.astype(np.float64)
  exps = np.exp(exps - exps.max(axis=1, keepdims=True))
  return (exps / exps.sum(axis=1, keepdims=True)).astype(x.dtype)


# x - m and m - max(x) are up to about 100 in size, and rounded to 2**-24 of
# that, which is the relative error of their exponentials. bfloat16: a unit is
# up to 2**-7.
for _name, _rtol, _params in (
    ("cluster_softmax", 2e-5, {
        "2_blocks": {},
        "4_blocks": dict(num_blocks=4, num_clusters=2, num_steps=1),
    }),
    ("cluster_softmax_bfloat16", 1e-2, {
        "4_blocks": dict(
            num_blocks=4, num_steps=2, num_stages=3, dtype=jnp.bfloat16
        ),
    }),
):
  kernel_case(
      name=_name,
      inputs=make_inputs,
      reference=reference,
      specs=specs,
      targets=("h100", "h200", "b200"),
      rtol=_rtol,
      atol=1e-30,
      params=_params,
  )(make_kernel)
