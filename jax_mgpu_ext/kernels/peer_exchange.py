"""Two blocks of a cluster exchange rows through GMEM behind a `ClusterBarrier`.

Block `c` doubles its rows, posts them in its mailbox in GMEM, and adds what its
peer posted to its own rows, one tile at a time:

  y[c] = x[c] + 2 * x[1 - c]

Protocol of `posted`, `ClusterBarrier(collective_axes=("block",))`, per step:

  who arrives   The one warpgroup of each block, once, when its tile lies in
                GMEM. A cluster arrival signals every block along the collective
                axis, one's own included, so each block's barrier gets 2
                arrivals: `num_arrivals=1` counts those of one block, and
                Pallas multiplies by the blocks that signal.
  who waits     The same warpgroup, directly after it arrived.
  phases        One a step. No block can be two steps ahead: to complete step
                s + 1 a barrier needs its own block's arrival, which comes
                after that block's wait for step s.

`loaded`, a `Barrier` with one arrival (the TMA load), is local to the block:
its warpgroup loads and waits, twice a step, so a completion is always awaited
before the next load.

Why it is race free:
  * The mailbox is written by TMA, and `wait_smem_to_gmem(0)` returns when the
    writes are done, not only when SMEM was read. It ends in a barrier of the
    warpgroup. The arrival comes after it in program order. That matters on the
    GPU: a cluster arrival is made by one thread a signalled block and waits for
    nobody else, so rows stored by all 128 threads with ordinary stores might
    still be on their way.
  * The peer reads the mailbox only after its wait, and by TMA again, which
    reads L2, where the rows are, and never an outdated line of L1.
  * Every step has its own rows of the mailbox, so nothing there is written
    twice and no second barrier is needed.
  * SMEM is read and written by ordinary instructions and by TMA in turn:
    `commit_smem` stands between the former and the next TMA access,
    `barrier_wait` and `wait_smem_to_gmem` between TMA and the former.
  * At the end neither block has an arrival of the peer under way: it waited for
    all of them. A block may leave while its peer still reads GMEM.
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
      own_smem=plgpu.SMEM(tile, dtype),
      peer_smem=plgpu.SMEM(tile, dtype),
      loaded=plgpu.Barrier(num_arrivals=1, num_barriers=1),
      posted=plgpu.ClusterBarrier(
          collective_axes=("block",), num_arrivals=1, num_barriers=1
      ),
  )


def make_kernel(
    *, num_steps: int = 4, tile=(64, 64), dtype=jnp.float32, interpret=None
) -> Callable[[jax.Array], jax.Array]:
  """Builds the kernel.

  Args:
    num_steps: How many tiles each block exchanges.
    tile: Rows and columns of one tile, in elements.
    dtype: Element type of input and output.
    interpret: As `interpret` of `plgpu.kernel`; None compiles for the GPU.

  Returns:
    A jitted function of one array of shape `(2, num_steps * rows, cols)`, one
    half for each block, that returns an array of the same shape and type.

  Raises:
    ValueError: If a count is not positive or TMA could not move the tile.
  """
  check_count(num_steps=num_steps)
  rows, cols = check_tile(tile, dtype)

  def peer_exchange(x, y, mailbox, *, own_smem, peer_smem, loaded, posted):
    block = lax.axis_index("block")
    peer = 1 - block

    @pl.loop(0, num_steps)
    def _step(step):
      at = pl.ds(step * rows, rows)
      plgpu.copy_gmem_to_smem(x.at[block, at], own_smem, loaded)
      plgpu.barrier_wait(loaded)
      own = own_smem[...]
      own_smem[...] = own + own
      plgpu.commit_smem()
      plgpu.copy_smem_to_gmem(own_smem, mailbox.at[block, at])
      plgpu.wait_smem_to_gmem(0)

      plgpu.barrier_arrive(posted)
      plgpu.barrier_wait(posted)

      plgpu.copy_gmem_to_smem(mailbox.at[peer, at], peer_smem, loaded)
      plgpu.barrier_wait(loaded)
      peer_smem[...] = own + peer_smem[...]
      plgpu.commit_smem()
      plgpu.copy_smem_to_gmem(peer_smem, y.at[block, at])
      plgpu.wait_smem_to_gmem(0)

  out_type = jax.ShapeDtypeStruct((2, num_steps * rows, cols), dtype)
  kernel = plgpu.kernel(
      peer_exchange,
      out_type=(out_type, out_type),
      scratch_types=specs(tile=(rows, cols), dtype=dtype),
      cluster=(2,),
      cluster_names=("block",),
      interpret=interpret,
  )
  return jax.jit(lambda x: kernel(x)[0])


def make_inputs(
    rng: np.random.Generator, *, num_steps=4, tile=(64, 64), dtype=jnp.float32
) -> tuple[np.ndarray]:
  """Draws small whole numbers, so that every type computes exactly."""
  shape = (2, num_steps * tile[0], tile[1])
  return (rng.integers(-8, 9, shape).astype(dtype),)


def reference(x: np.ndarray) -> np.ndarray:
  """What the kernel computes: `x[c] + 2 * x[1 - c]`."""
  return (x + 2 * x[::-1]).astype(x.dtype)


kernel_case(
    name="peer_exchange",
    inputs=make_inputs,
    reference=reference,
    specs=specs,
    targets=("h100", "h200", "b200"),
    params={
        "float32": {},
        "bfloat16": dict(num_steps=1, tile=(16, 128), dtype=jnp.bfloat16),
    },
)(make_kernel)
