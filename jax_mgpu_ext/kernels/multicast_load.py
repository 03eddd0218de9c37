"""One TMA multicast load fills the same stage in both blocks of a cluster.

Both blocks need every tile of `x`, for different results, so the cluster reads
each tile from GMEM once: every block loads half of it and multicasts that half
into the stage of both. There is one stage, used again in every step.

  y[0] = sum of the tiles        y[1] = sum of the tiles squared

Protocol. Each block has one warpgroup, producer and consumer in one.

  full    `Barrier(num_arrivals=1)`, local to each block.
          Arrives: the block's own load, once, announcing the bytes of the whole
          tile; the halves of both blocks then count those bytes down, so the
          phase completes when both halves are there. If the peer's half comes
          before the announcement, the count of bytes goes below zero for a
          while, which is legal, and the phase waits for the arrival.
          Waits: the block's warpgroup, every step.
  empty   `ClusterBarrier(collective_axes=("block",), num_arrivals=1)`.
          Arrives: the warpgroup of each block, when it has read its stage, at
          the barriers of both blocks: 2 arrivals a phase.
          Waits: each warpgroup before its next load, and once more at the end.

Why `empty` must be a cluster barrier: a block's load overwrites half of its
peer's stage, so it has to know that the peer, too, has read it. With a local
barrier the slower block would see the next tile too early.

Why it is race free:
  * A stage is filled only after both blocks released it, and read only after
    both halves have landed.
  * `commit_smem` stands between the ordinary loads of all 128 threads and the
    arrival: it orders them before TMA's next write, and it is a barrier of the
    warpgroup. The arrival itself is made by one thread a signalled block and
    waits for no other.
  * The first load waits for nobody, as the stage starts out empty; the last
    release is awaited by nobody in the loop. The wait after the loop (the
    producer's tail) takes it, so every completion is observed, and no block
    leaves while its peer's arrivals, or its own half of a multicast, are still
    under way.
  * No deadlock: a block's release of step s depends only on loads of step s,
    which wait for releases of step s - 1.

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


def specs(*, tile=(64, 64), dtype=jnp.float32) -> dict:
  """Returns the scratch types of the kernel, for `plgpu.kernel`."""
  return dict(
      stage=plgpu.SMEM(tile, dtype),
      y_smem=plgpu.SMEM(tile, jnp.float32),
      full=plgpu.Barrier(num_arrivals=1, num_barriers=1),
      empty=plgpu.ClusterBarrier(
          collective_axes=("block",), num_arrivals=1, num_barriers=1
      ),
  )


def make_kernel(
    *, num_steps: int = 5, tile=(64, 64), dtype=jnp.float32, interpret=None
) -> Callable[[jax.Array], jax.Array]:
  """Builds the kernel.

  Args:
    num_steps: How many tiles are added up.
    tile: Rows and columns of one tile, in elements; rows must be even, as each
      block loads half of them.
    dtype: Element type of the input.
    interpret: As `interpret` of `plgpu.kernel`; None compiles for the GPU.

  Returns:
    A jitted function of one array of shape `(num_steps * rows, cols)` that
    returns a float32 array of shape `(2, rows, cols)`.

  Raises:
    ValueError: If a count is not positive or TMA could not move the tile.
  """
  check_count(num_steps=num_steps)
  rows, cols = check_tile(tile, dtype, num_blocks=2)

  def multicast_load(x, y, *, stage, y_smem, full, empty):
    block = lax.axis_index("block")

    def take(step):
      plgpu.copy_gmem_to_smem(
          x.at[pl.ds(step * rows, rows)], stage, full, collective_axes="block"
      )
      plgpu.barrier_wait(full)
      value = stage[...].astype(jnp.float32)
      plgpu.commit_smem()
      plgpu.barrier_arrive(empty)
      return lax.cond(block == 0, lambda: value, lambda: value * value)

    def later_step(step, total):
      plgpu.barrier_wait(empty)
      return total + take(step)

    total = lax.fori_loop(1, num_steps, later_step, take(0))
    plgpu.barrier_wait(empty)

    y_smem[...] = total
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(y_smem, y.at[block])
    plgpu.wait_smem_to_gmem(0)

  return jax.jit(
      plgpu.kernel(
          multicast_load,
          out_type=jax.ShapeDtypeStruct((2, rows, cols), jnp.float32),
          scratch_types=specs(tile=(rows, cols), dtype=dtype),
          cluster=(2,),
          cluster_names=("block",),
          interpret=interpret,
      )
  )


def make_inputs(
    rng: np.random.Generator, *, num_steps=5, tile=(64, 64), dtype=jnp.float32
) -> tuple[np.ndarray]:
  """Draws small whole numbers, so that every type computes exactly."""
  shape = (num_steps * tile[0], tile[1])
  return (rng.integers(-8, 9, shape).astype(dtype),)


def reference(x: np.ndarray, *, tile=(64, 64)) -> np.ndarray:
  """What the kernel computes: the sums of the tiles and of their squares."""
  tiles = x.astype(np.float32).reshape(-1, *tile)
  return np.stack([tiles.sum(0), (tiles**2).sum(0)])


kernel_case(
    name="multicast_load",
    inputs=make_inputs,
    reference=reference,
    specs=specs,
    targets=("h100", "h200", "b200"),
    params={
        "float32": {},
        "bfloat16": dict(num_steps=2, tile=(16, 128), dtype=jnp.bfloat16),
    },
)(make_kernel)
