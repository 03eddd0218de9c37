"""A producer warpgroup fills a ring of stages; one or two consumers drain it.

The plain ring, in one block, without a cluster. Block `i` multiplies and adds
up tiles; each consumer takes its share of the rows of every tile:

  y[i] = sum over the steps s of a[i, s] * b[i, s]

Step s uses stage s % num_stages, which holds one tile of `a` and one of `b`:

  steps      0     1     2     3     4     5    ...     (num_stages = 3)
  stage      0     1     2     0     1     2
  producer   first lap: no     waits for `empty`: the stage's release by
             wait, all free    every consumer, 3 steps ago

The stages are filled by TMA, or (`filled_by="stores"`) by the producer's
ordinary loads and stores, as a producer does that changes what it fetches.

Protocol, for each stage (warpgroup 0 is the producer, the others consume):

  full    `Barrier(num_barriers=num_stages)`, of the block.
          Arrives: by TMA, the two loads that the producer starts; by stores,
          the producer, after them.
          Waits: every consumer, every step.
  empty   `Barrier(num_arrivals=num_consumers, num_barriers=num_stages)`.
          Arrives: every consumer, after it read its share of the stage.
          Waits: the producer, from its second lap on, and in its tail.

Why it is race free:
  * A stage is filled after all consumers have released it, and read after all
    of it is there.
  * Filled by TMA: `commit_smem` stands between a consumer's ordinary loads and
    its arrival, and orders the reads of its 128 threads before TMA's next
    write. Filled by stores: loads and stores are of one kind, all 128 threads
    arrive themselves, and the barrier alone orders them.
  * No completion is missed: a stage becomes full again only after it was
    released by all, that is, after every consumer's wait; and free again only
    after it was filled, that is, after the producer's wait.
  * The tail: the last min(num_stages, num_steps) releases are awaited after the
    loop, so as many waits as completions are made, also when there are no
    steps.
  * No deadlock: step s waits for releases of step s - num_stages only, and
    those for the filling of that step.
  * Each consumer writes, and stores, its own rows of `y_smem` alone.

GPU interpret mode checks all of the above, but for the 128 CUDA threads of a
warpgroup, for which one thread stands.
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
from jax_mgpu_ext.specs import RingBuffer

_FILLED_BY = ("tma", "stores")


def specs(
    *,
    num_stages=3,
    num_consumers=1,
    filled_by="tma",
    tile=(64, 64),
    dtype=jnp.float32,
) -> list:
  """Returns the scratch types of the kernel, for `plgpu.kernel`."""
  stage = dict(a=plgpu.SMEM(tile, dtype), b=plgpu.SMEM(tile, dtype))
  ring = RingBuffer(
      stage,
      num_stages,
      num_consumers=num_consumers,
      transfers_per_stage=int(filled_by == "tma"),
      consumer_reads="generic",
  )
  return [ring, plgpu.SMEM(tile, jnp.float32)]


def make_kernel(
    *,
    num_blocks: int = 1,
    num_steps: int = 8,
    num_stages: int = 3,
    num_consumers: int = 1,
    filled_by: str = "tma",
    unroll: bool = False,
    tile=(64, 64),
    dtype=jnp.float32,
    interpret=None,
) -> Callable[[jax.Array, jax.Array], jax.Array]:
  """Builds the kernel.

  Args:
    num_blocks: How many blocks are launched.
    num_steps: How many tiles each block multiplies and adds up; 0 gives zeros.
    num_stages: Stages of the ring, 1 to 32; may exceed `num_steps`.
    num_consumers: Consumer warpgroups, 1 or 2, which share the rows of a tile.
    filled_by: "tma", or "stores".
    unroll: Whether the steps are Python integers, in place of traced ones.
    tile: Rows and columns of one tile, in elements.
    dtype: Element type of both inputs.
    interpret: As `interpret` of `plgpu.kernel`; None compiles for the GPU.

  Returns:
    A jitted function of `a` and `b`, both of shape
    `(num_blocks, max(num_steps, 1) * rows, cols)` (TMA takes no empty array),
    that returns a float32 array of shape `(num_blocks, rows, cols)`.

  Raises:
    ValueError: If an argument is out of range or TMA could not move the tile.
  """
  rows, cols = check_arguments(
      num_blocks, num_steps, num_stages, num_consumers, filled_by, tile, dtype
  )
  share = rows // num_consumers

  def local_ring(a, b, y, ring, y_smem):
    block = lax.axis_index("block")
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == 0)
    def _producer():

      @steps(num_steps, unroll)
      def _fill(step):
        at = pl.ds(step * rows, rows)
        src = dict(a=a.at[block, at], b=b.at[block, at])
        ring.producer_acquire(step)
        if filled_by == "tma":
          ring.copy_in(src, step=step)
        else:
          stage = ring.stage(step)
          stage["a"][...] = src["a"][...]
          stage["b"][...] = src["b"][...]
          ring.producer_commit(step)

      ring.producer_tail(num_steps)

    @pl.when(warpgroup > 0)
    def _consumer():
      mine = pl.ds((warpgroup - 1) * share, share)

      def take(step):
        stage = ring.consumer_wait(step)
        value = stage["a"][mine].astype(jnp.float32)
        value *= stage["b"][mine].astype(jnp.float32)
        ring.consumer_release(step)
        return value

      y_smem[mine] = total_of(take, num_steps, unroll, (share, cols))
      plgpu.commit_smem()
      plgpu.copy_smem_to_gmem(y_smem.at[mine], y.at[block, mine])
      plgpu.wait_smem_to_gmem(0)

  return jax.jit(
      plgpu.kernel(
          local_ring,
          out_type=jax.ShapeDtypeStruct((num_blocks, rows, cols), jnp.float32),
          scratch_types=specs(
              num_stages=num_stages,
              num_consumers=num_consumers,
              filled_by=filled_by,
              tile=(rows, cols),
              dtype=dtype,
          ),
          grid=(num_blocks,),
          grid_names=("block",),
          num_threads=1 + num_consumers,
          thread_name="warpgroup",
          interpret=interpret,
      )
  )


def check_arguments(
    num_blocks, num_steps, num_stages, num_consumers, filled_by, tile, dtype
) -> tuple[int, int]:
  """Checks the arguments of `make_kernel`, and returns rows and columns.

  Raises:
    ValueError: If an argument is out of range or TMA could not move the tile.
  """
  check_count(
      num_blocks=num_blocks, num_stages=num_stages, num_consumers=num_consumers
  )
  if not isinstance(num_steps, int) or isinstance(num_steps, bool) or (
      num_steps < 0
  ):
    raise ValueError(f"Expected num_steps to be at least 0, got {num_steps=}")
  if num_consumers > 2:
    raise ValueError(f"Expected one or two consumers, got {num_consumers=}")
  if filled_by not in _FILLED_BY:
    raise ValueError(
        f"Expected filled_by to be {' or '.join(_FILLED_BY)}, got {filled_by=}"
    )
  rows, cols = check_tile(tile, dtype)
  if rows % num_consumers:
    raise ValueError(
        f"Expected rows that {num_consumers=} share evenly, got {tile=}"
    )
  check_tile((rows // num_consumers, cols), dtype)
  return rows, cols


def steps(num_steps: int, unroll: bool):
  """Returns a decorator that runs a function for each step in turn."""
  if not unroll:
    return pl.loop(0, num_steps)

  def run(body):
    for step in range(num_steps):
      body(step)

  return run


def total_of(take, num_steps: int, unroll: bool, shape) -> jax.Array:
  """Returns the sum of `take(step)` over the steps."""
  if not num_steps:
    return jnp.zeros(shape, jnp.float32)
  if unroll:
    total = take(0)
    for step in range(1, num_steps):
      total = total + take(step)
    return total
  return lax.fori_loop(
      1, num_steps, lambda step, total: total + take(step), take(0)
  )


def make_inputs(
    rng: np.random.Generator,
    *,
    num_blocks=1,
    num_steps=8,
    tile=(64, 64),
    dtype=jnp.float32,
) -> tuple[np.ndarray, np.ndarray]:
  """Draws small whole numbers, so that every type computes exactly."""
  shape = (num_blocks, max(num_steps, 1) * tile[0], tile[1])
  a = rng.integers(-8, 9, shape).astype(dtype)
  b = rng.integers(-8, 9, shape).astype(dtype)
  return a, b


def reference(
    a: np.ndarray, b: np.ndarray, *, num_steps=8, tile=(64, 64)
) -> np.ndarray:
  """What the kernel computes: products of tiles, added up over the steps."""
  products = a.astype(np.float32) * b.astype(np.float32)
  products = products.reshape(a.shape[0], -1, *tile)
  return products[:, :num_steps].sum(1)


kernel_case(
    name="local_ring",
    inputs=make_inputs,
    reference=reference,
    specs=specs,
    targets=("h100", "h200", "b200"),
    params={
        "1_consumer": {},
        "2_consumers": dict(
            num_consumers=2, num_blocks=2, num_stages=2, num_steps=5,
            tile=(32, 64), dtype=jnp.bfloat16,
        ),
        "stores": dict(
            filled_by="stores", num_consumers=2, num_stages=4, num_steps=2
        ),
        "no_steps": dict(num_steps=0, num_stages=1),
    },
)(make_kernel)
