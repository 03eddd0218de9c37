"""A producer and a consumer warpgroup share a ring of stages, in two blocks.

Each cluster `c` of two blocks multiplies and adds up tiles; operand `a` is
common to both blocks and comes by multicast, operand `b` is each block's own:

  y[c, block] = sum over the steps s of a[c, s] * b[c, block, s]

Step s uses stage s % num_stages, which holds one tile of `a` and one of `b`:

  steps      0     1     2     3     4     5    ...     (num_stages = 3)
  stage      0     1     2     0     1     2
  producer   first lap: no     waits for `empty`: the stage's release by
             wait, all empty   the consumers of both blocks, 3 steps ago

Protocol, for each stage (warpgroup 0 is the producer, 1 the consumer):

  full    `Barrier(num_arrivals=2, num_barriers=num_stages)`, local.
          Arrives: the two loads the producer starts, one for `a`, one for `b`.
          The load of `a` announces the bytes of the whole tile, of which each
          block fetches half for both, so the phase completes when the halves
          of both blocks and the tile of `b` are there.
          Waits: the consumer, every step.
  empty   `ClusterBarrier(collective_axes=("block",), num_arrivals=1,
          num_barriers=num_stages)`.
          Arrives: the consumer, after it read the stage, in both blocks: 2
          arrivals a phase, one by the consumer of each block.
          Waits: the producer, from its second lap on, and in its tail.

Why it is race free:
  * The producer's load of `a` writes into the peer's stage too; the wait for
    `empty` covers it since the peer's consumer arrives there as well. The load
    of `b` is covered because the block's own consumer does.
  * `commit_smem` stands between the consumer's ordinary loads and its arrival:
    it orders the reads of all 128 threads before TMA's next write. The arrival
    itself is made by one thread a signalled block and waits for no other.
  * No completion is missed: a stage becomes full again only after it was
    released, that is, after the consumer's wait; and empty again only after
    it was filled, that is, after the producer's wait.
  * The tail: the last min(num_stages, num_steps) releases are awaited after the
    loop, so as many waits as completions are made, and a block does not leave
    while arrivals of its peer, or its own half of a multicast, are under way.
  * No deadlock: step s waits for releases of step s - num_stages only, and
    those for loads of that step.
  * `y_smem` belongs to the consumer alone.

GPU interpret mode carries out a multicast as a load by each block for itself.
It checks all of the above but for writes into the peer's stage.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np

from jax_mgpu_ext.check import kernel_case
from jax_mgpu_ext.kernels.tiles import check_count, check_tile

# Mosaic keeps the phases of one barrier array in the bits of an int32.
_MAX_STAGES = 32


def specs(*, num_stages=3, tile=(64, 64), dtype=jnp.float32) -> dict:
  """Returns the scratch types of the kernel, for `plgpu.kernel`."""
  return dict(
      a_smem=plgpu.SMEM((num_stages, *tile), dtype),
      b_smem=plgpu.SMEM((num_stages, *tile), dtype),
      y_smem=plgpu.SMEM(tile, jnp.float32),
      full=plgpu.Barrier(num_arrivals=2, num_barriers=num_stages),
      empty=plgpu.ClusterBarrier(
          collective_axes=("block",), num_arrivals=1, num_barriers=num_stages
      ),
  )


def make_kernel(
    *,
    num_clusters: int = 1,
    num_steps: int = 8,
    num_stages: int = 3,
    tile=(64, 64),
    dtype=jnp.float32,
    interpret=None,
) -> Callable[[jax.Array, jax.Array], jax.Array]:
  """Builds the kernel.

  Args:
    num_clusters: How many clusters of two blocks are launched.
    num_steps: How many tiles each block multiplies and adds up.
    num_stages: Stages of the ring, 1 to 32; may exceed `num_steps`.
    tile: Rows and columns of one tile, in elements; rows must be even, as each
      block loads half of the tile of `a`.
    dtype: Element type of both inputs.
    interpret: As `interpret` of `plgpu.kernel`; None compiles for the GPU.

  Returns:
    A jitted function of `a`, of shape `(num_clusters, num_steps * rows, cols)`,
    and `b`, `(num_clusters, 2, num_steps * rows, cols)`, that returns a float32
    array of shape `(num_clusters, 2, rows, cols)`.

  Raises:
    ValueError: If a count is out of range or TMA could not move the tile.
  """
  check_count(
      num_clusters=num_clusters, num_steps=num_steps, num_stages=num_stages
  )
  if num_stages > _MAX_STAGES:
    raise ValueError(
        f"Expected at most {_MAX_STAGES} stages, got {num_stages=}"
    )
  rows, cols = check_tile(tile, dtype, num_blocks=2)

  def cluster_ring(a, b, y, *, a_smem, b_smem, y_smem, full, empty):
    cluster = lax.axis_index("cluster")
    block = lax.axis_index("block")
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == 0)
    def _producer():

      @pl.loop(0, num_steps)
      def _fill(step):
        stage = lax.rem(step, num_stages)

        @pl.when(step >= num_stages)
        def _acquire():
          plgpu.barrier_wait(empty.at[stage])

        at = pl.ds(step * rows, rows)
        plgpu.copy_gmem_to_smem(
            a.at[cluster, at],
            a_smem.at[stage],
            full.at[stage],
            collective_axes="block",
        )
        plgpu.copy_gmem_to_smem(
            b.at[cluster, block, at], b_smem.at[stage], full.at[stage]
        )

      @pl.loop(max(0, num_steps - num_stages), num_steps)
      def _tail(step):
        plgpu.barrier_wait(empty.at[lax.rem(step, num_stages)])

    @pl.when(warpgroup == 1)
    def _consumer():

      def take(step):
        stage = lax.rem(step, num_stages)
        plgpu.barrier_wait(full.at[stage])
        value = a_smem[stage].astype(jnp.float32)
        value *= b_smem[stage].astype(jnp.float32)
        plgpu.commit_smem()
        plgpu.barrier_arrive(empty.at[stage])
        return value

      y_smem[...] = lax.fori_loop(
          1, num_steps, lambda step, total: total + take(step), take(0)
      )
      plgpu.commit_smem()
      plgpu.copy_smem_to_gmem(y_smem, y.at[cluster, block])
      plgpu.wait_smem_to_gmem(0)

  return jax.jit(
      plgpu.kernel(
          cluster_ring,
          out_type=jax.ShapeDtypeStruct(
              (num_clusters, 2, rows, cols), jnp.float32
          ),
          scratch_types=specs(
              num_stages=num_stages, tile=(rows, cols), dtype=dtype
          ),
          grid=(num_clusters,),
          grid_names=("cluster",),
          cluster=(2,),
          cluster_names=("block",),
          num_threads=2,
          thread_name="warpgroup",
          interpret=interpret,
      )
  )


def make_inputs(
    rng: np.random.Generator,
    *,
    num_clusters=1,
    num_steps=8,
    tile=(64, 64),
    dtype=jnp.float32,
) -> tuple[np.ndarray, np.ndarray]:
  """Draws small whole numbers, so that every type computes exactly."""
  rows, cols = num_steps * tile[0], tile[1]
  a = rng.integers(-8, 9, (num_clusters, rows, cols)).astype(dtype)
  b = rng.integers(-8, 9, (num_clusters, 2, rows, cols)).astype(dtype)
  return a, b


def reference(a: np.ndarray, b: np.ndarray, *, tile=(64, 64)) -> np.ndarray:
  """What the kernel computes: products of tiles, added up over the steps."""
  products = a.astype(np.float32)[:, None] * b.astype(np.float32)
  return products.reshape(*b.shape[:2], -1, *tile).sum(2)


kernel_case(
    name="cluster_ring",
    inputs=make_inputs,
    reference=reference,
    specs=specs,
    targets=("h100", "h200", "b200"),
    params={
        "3_stages": {},
        "1_stage": dict(num_stages=1, num_steps=3, num_clusters=2),
        "4_stages_2_steps": dict(
            num_stages=4, num_steps=2, tile=(16, 128), dtype=jnp.bfloat16
        ),
    },
)(make_kernel)
