"""RMS-norm of rows that are split over the blocks of a cluster, with weights.

  y[r, c] = x[r, c] / sqrt(mean(x[r]**2) + epsilon) * w[c]

Block `i` of a cluster of 1, 2 or 4 holds columns `i * cols` to `(i + 1) *
cols`; a step is one tile of `rows` rows of them. Warpgroup 0 is the producer
and loads the tiles into a ring, warpgroup 1 the consumer and does all the rest.
Before its first step it loads the block's part of `w`. Per step it adds up the
squares of its part of each row, posts the sums in its own SMEM, and reads those
of all blocks out of theirs, in the same order in each block, so that all scale
a row by the same number.

Protocol of the ring: as in `cluster_ring`, but for `empty`, which is local.

Protocol of `loaded`, a `Barrier` with one arrival: the load of `w`. The
consumer starts it, and waits, once.

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

Why it is race free: `cluster_softmax` says it, whose exchange is the same, with
two refs in place of one; and what the interpreter cannot see. `w_smem` is
written once, by TMA, and read after the wait for it.
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
from jax_mgpu_ext.kernels import cluster_softmax
from jax_mgpu_ext.kernels.cluster_softmax import load, over_rows, read_cluster
from jax_mgpu_ext.specs import RingBuffer, TiledSMEM

EPSILON = 1e-6


def specs(
    *, num_blocks=2, num_stages=2, tile=(64, 128), dtype=jnp.float32
) -> list:
  """Returns the scratch types of the kernel, for `plgpu.kernel`."""
  return [
      RingBuffer(TiledSMEM(tile, dtype), num_stages, consumer_reads="generic"),
      TiledSMEM(tile, dtype),
      plgpu.SMEM((tile[1],), dtype),
      plgpu.Barrier(num_arrivals=1, num_barriers=1),
      plgpu.SMEM((tile[0],), jnp.float32),
      cluster_softmax.posts_of_cluster(num_blocks),
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
) -> Callable[[jax.Array, jax.Array], jax.Array]:
  """Builds the kernel.

  Args:
    num_blocks: Blocks of a cluster, which share each row: 1, 2 or 4.
    num_clusters: How many clusters are launched.
    num_steps: Tiles of each block.
    num_stages: Stages of the ring, 1 to 32; may exceed `num_steps`.
    tile: Rows and columns of one tile, in elements; rows a multiple of 64.
    dtype: Element type of inputs and output; computed in float32.
    interpret: As `interpret` of `plgpu.kernel`; None compiles for the GPU.

  Returns:
    A jitted function of `x`, of shape `(num_clusters * num_steps * rows,
    num_blocks * cols)`, and `w`, `(num_blocks * cols,)`, that returns an array
    like `x`.

  Raises:
    ValueError: If a count is out of range or TMA could not move the tile.
  """
  rows, cols = cluster_softmax.check_arguments(
      num_blocks, num_clusters, num_steps, num_stages, tile, dtype
  )

  def cluster_rms_norm(
      x, w, y, ring, y_smem, w_smem, loaded, squares, posts
  ):
    block = lax.axis_index("block")
    warpgroup = lax.axis_index("warpgroup")
    first_row = lax.axis_index("cluster") * (num_steps * rows)
    my_cols = pl.ds(block * cols, cols)

    def tile_of(ref, step):
      return ref.at[pl.ds(first_row + step * rows, rows), my_cols]

    @pl.when(warpgroup == 0)
    def _producer():

      @pl.loop(0, num_steps)
      def _fill(step):
        ring.producer_acquire(step)
        ring.copy_in(tile_of(x, step), step=step)

      ring.producer_tail(num_steps)

    @pl.when(warpgroup == 1)
    def _consumer():
      plgpu.copy_gmem_to_smem(w.at[my_cols], w_smem, loaded)
      plgpu.barrier_wait(loaded)

      @pl.loop(0, num_steps)
      def _step(step):
        value = load(ring.consumer_wait(step), plgpu.Layout.WGMMA)
        ring.consumer_release(step)
        value = value.astype(jnp.float32)
        total = jnp.sum(value * value, axis=1)

        @pl.when(step > 0)
        def _reuse():
          plgpu.barrier_wait(posts.empty)

        squares[...] = total
        plgpu.commit_smem()
        plgpu.barrier_arrive(posts.full)
        plgpu.barrier_wait(posts.full)
        scale = scale_of(read_cluster(squares, num_blocks), cols)
        plgpu.commit_smem()
        plgpu.barrier_arrive(posts.empty)

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        y_smem[...] = scaled(value, scale, w_smem).astype(dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(y_smem, tile_of(y, step))

      plgpu.barrier_wait(posts.empty)
      plgpu.wait_smem_to_gmem(0)

  return jax.jit(
      plgpu.kernel(
          cluster_rms_norm,
          out_type=cluster_softmax.out_type(
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


def scale_of(squares, cols: int):
  """Returns what each row is to be multiplied by.

  Args:
    squares: The sums of the squares of each part of the rows.
    cols: Columns of a part.
  """
  mean = functools.reduce(operator.add, squares) / (len(squares) * cols)
  return lax.rsqrt(mean + EPSILON)


def scaled(value, scale, w_smem):
  """Multiplies each row by its scale and each column by its weight."""
  weights = load(w_smem, plgpu.Layout.WGMMA.reduce(0)).astype(jnp.float32)
  weights = lax.broadcast_in_dim(weights, value.shape, [1])
  return value * over_rows(scale, value.shape) * weights


def make_inputs(
    rng: np.random.Generator,
    *,
    num_blocks=2,
    num_clusters=1,
    num_steps=4,
    tile=(64, 128),
    dtype=jnp.float32,
) -> tuple[np.ndarray, np.ndarray]:
  """Draws values whose size differs much between the rows, and their parts."""
  shape = (num_clusters * num_steps * tile[0], num_blocks, tile[1])
  x = rng.normal(size=shape) * np.exp(rng.normal(size=(*shape[:2], 1)))
  w = rng.normal(size=num_blocks * tile[1])
  return x.reshape(shape[0], -1).astype(dtype), w.astype(dtype)


def reference(x: np.ndarray, w: np.ndarray) -> np.ndarray:
  """What the kernel computes, in float64."""
  value = x.astype(np.float64)
  mean = np.mean(value * value, axis=1, keepdims=True)
  y = value / np.sqrt(mean + EPSILON) * w.astype(np.float64)
  return y.astype(x.dtype)


# Sums of a few hundred squares, and a reciprocal root: a few units of float32.
# In bfloat16 one unit is up to 2**-7.
for _name, _rtol, _params in (
    ("cluster_rms_norm", 1e-5, {
        "2_blocks": {},
        "4_blocks": dict(num_blocks=4, num_clusters=2, num_steps=1),
    }),
    ("cluster_rms_norm_bfloat16", 1e-2, {
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
      params=_params,
  )(make_kernel)
