"""Small kernels that hang, or misuse barriers, each with a twin that is right.

A case builds the kernel's body for `bad=True` and for `bad=False`. `# HERE` marks
the line that the report of the bad one must name first.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import inspect
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from jax_mgpu_ext import specs

F32 = jnp.float32
ONE = dict(num_barriers=())
TWO_THREADS = dict(num_threads=2, thread_name="wg")
THREE_THREADS = dict(num_threads=3, thread_name="wg")
TWO_BLOCKS = dict(cluster=(2,), cluster_names=("block",))


@dataclasses.dataclass(frozen=True)
class Case:
  """One kernel and its twin.

  Attributes:
    make: bad -> (body, scratch types).
    code: What the bad one is reported as.
    barrier: The barrier that the report names first, as the body calls it; None
      where there is none.
    mesh: Keywords of `plgpu.kernel`.
    timeout_s: The limit that the bad one is run with, or None.
  """

  make: Callable[[bool], tuple[Callable[..., None], dict[str, Any]]]
  code: str
  barrier: str | None
  mesh: dict[str, Any]
  timeout_s: float | None

  @property
  def name(self) -> str:
    return self.make.__name__

  def kernel(self, bad: bool) -> Callable[..., jax.Array]:
    body, scratch = self.make(bad)
    return jax.jit(plgpu.kernel(
        body, out_type=jax.ShapeDtypeStruct((128,), F32), scratch_types=scratch,
        interpret=plgpu.InterpretGPUParams(detect_races=True), **self.mesh,
    ))

  def line(self) -> int | None:
    """Returns the number of the line that is marked."""
    source, first = inspect.getsourcelines(self.make)
    marked = [n for n, line in enumerate(source, first) if "# HERE" in line]
    return marked[0] if marked else None


CASES: list[Case] = []


def case(code, barrier, mesh=(), timeout_s=None):
  def declare(make):
    CASES.append(Case(make, code, barrier, dict(mesh), timeout_s))
    return make

  return declare


def thread(number: int, name: str = "wg"):
  return pl.when(lax.axis_index(name) == number)


# DL001: wait cycles.


@case("DL001", "a", TWO_THREADS)
def two_wait_for_each_other(bad):
  def body(x, o, *, a, b):
    del x, o

    @thread(0)
    def _zero():
      if not bad:
        plgpu.barrier_arrive(b)
      plgpu.barrier_wait(a)  # HERE
      if bad:
        plgpu.barrier_arrive(b)

    @thread(1)
    def _one():
      plgpu.barrier_wait(b)
      plgpu.barrier_arrive(a)

  return body, dict(a=plgpu.Barrier(**ONE), b=plgpu.Barrier(**ONE))


@case("DL001", "done", TWO_THREADS)
def all_wait_before_they_arrive(bad):
  def body(x, o, *, done):
    del x, o
    if not bad:
      plgpu.barrier_arrive(done)
    plgpu.barrier_wait(done)  # HERE
    if bad:
      plgpu.barrier_arrive(done)

  return body, dict(done=plgpu.Barrier(num_arrivals=2, **ONE))


@case("DL001", "turn[0]", THREE_THREADS)
def three_wait_round_a_table(bad):
  def body(x, o, *, turn):
    del x, o
    for number in range(3):
      @thread(number)
      def _one(number=number):
        if not bad and not number:
          plgpu.barrier_arrive(turn.at[1])
        plgpu.barrier_wait(turn.at[number])  # HERE
        if bad or number:
          plgpu.barrier_arrive(turn.at[(number + 1) % 3])

  return body, dict(turn=plgpu.Barrier(num_barriers=3))


@case("DL001", "ring.empty[0]", TWO_THREADS)
def consumer_holds_the_only_stage(bad):
  def body(x, o, *, ring):
    del o

    @thread(0)
    def _producer():
      @pl.loop(0, 3)
      def _fill(step):
        ring.producer_acquire(step)  # HERE
        ring.copy_in(x, step=step)
      ring.producer_tail(3)

    @thread(1)
    def _consumer():
      ring.consumer_wait(0)
      for step in range(1, 3):
        if not bad:
          ring.consumer_release(step - 1)
        ring.consumer_wait(step)
        if bad:
          ring.consumer_release(step - 1)
      ring.consumer_release(2)

  return body, dict(ring=_ring(1))


def _ring(num_stages, **arguments):
  return specs.RingBuffer(
      plgpu.SMEM((128,), F32), num_stages,
      **{"consumer_reads": "generic", **arguments},
  )


# DL002: missing arrivals.


@case("DL002", "done", TWO_THREADS)
def nobody_arrives(bad):
  def body(x, o, *, done):
    del x, o

    @thread(0)
    def _waits():
      plgpu.barrier_wait(done)  # HERE

    if not bad:
      @thread(1)
      def _arrives():
        plgpu.barrier_arrive(done)

  return body, dict(done=plgpu.Barrier(**ONE))


@case("DL002", "done")
def one_thread_waits_for_itself(bad):
  def body(x, o, *, done):
    del x, o
    if not bad:
      plgpu.barrier_arrive(done)
    plgpu.barrier_wait(done)  # HERE

  return body, dict(done=plgpu.Barrier(**ONE))


@case("DL002", "full")
def a_copy_that_never_comes(bad):
  def body(x, o, *, tile, full):
    for step in range(2):
      if not bad or not step:
        plgpu.copy_gmem_to_smem(x, tile, full)
      plgpu.barrier_wait(full)  # HERE
      o[...] = tile[...]
      plgpu.commit_smem()

  return body, dict(tile=plgpu.SMEM((128,), F32), full=plgpu.Barrier(**ONE))


@case("DL002", "ring.empty[1]", THREE_THREADS)
def one_consumer_leaves_early(bad):
  def body(x, o, *, ring):
    del o

    @thread(0)
    def _producer():
      @pl.loop(0, 6)
      def _fill(step):
        ring.producer_acquire(step)  # HERE
        ring.copy_in(x, step=step)
      ring.producer_tail(6)

    @pl.when(lax.axis_index("wg") > 0)
    def _consumer():
      last = jnp.where(lax.axis_index("wg") == 2, 3 if bad else 6, 6)

      @pl.loop(0, last)
      def _drain(step):
        ring.consumer_wait(step)
        ring.consumer_release(step)

  return body, dict(ring=_ring(2, num_consumers=2))


@case("DL002", "ring.empty[0]", TWO_THREADS)
def the_last_release_is_forgotten(bad):
  def body(x, o, *, ring):
    del o

    @thread(0)
    def _producer():
      @pl.loop(0, 5)
      def _fill(step):
        ring.producer_acquire(step)
        ring.copy_in(x, step=step)
      ring.producer_tail(5)  # HERE

    @thread(1)
    def _consumer():
      @pl.loop(0, 5)
      def _drain(step):
        ring.consumer_wait(step)
        if not bad:
          ring.consumer_release(step)
        else:
          pl.when(step < 4)(lambda: ring.consumer_release(step))

  return body, dict(ring=_ring(2))


@case("DL002", "done", TWO_THREADS)
def a_warp_waits_for_nobody(bad):
  def body(x, o, *, done):
    del x, o

    @thread(0)
    def _warps():
      @pl.core_map(plgpu.WarpMesh(axis_name="warp"))
      def _per_warp():
        @thread(1, "warp")
        def _one():
          plgpu.barrier_wait(done)  # HERE

    if not bad:
      @thread(1)
      def _arrives():
        plgpu.barrier_arrive(done)

  return body, dict(done=plgpu.Barrier(**ONE))


# DL003: counts that are never reached.


@case("DL003", "done", TWO_THREADS)
def a_count_too_high(bad):
  def body(x, o, *, done):
    del x, o
    plgpu.barrier_arrive(done)
    plgpu.barrier_wait(done)  # HERE

  count = 3 if bad else 2
  return body, dict(done=plgpu.Barrier(num_arrivals=count, **ONE))


@case("DL003", "ring.empty[0]", TWO_THREADS)
def more_consumers_than_there_are(bad):
  def body(x, o, *, ring):
    del o

    @thread(0)
    def _producer():
      @pl.loop(0, 4)
      def _fill(step):
        ring.producer_acquire(step)  # HERE
        ring.copy_in(x, step=step)
      ring.producer_tail(4)

    @thread(1)
    def _consumer():
      @pl.loop(0, 4)
      def _drain(step):
        ring.consumer_wait(step)
        ring.consumer_release(step)

  return body, dict(ring=_ring(2, num_consumers=2 if bad else 1))


@case("DL003", "ring.full[0]", TWO_THREADS)
def fewer_copies_than_transfers(bad):
  def body(x, o, *, ring):
    del o

    @thread(0)
    def _producer():
      ring.producer_acquire(0)
      ring.copy_in(x, step=0)

    @thread(1)
    def _consumer():
      ring.consumer_wait(0)  # HERE
      ring.consumer_release(0)

  return body, dict(ring=_ring(2, transfers_per_stage=2 if bad else 1))


# DL004: phases that nobody waited for.


@case("DL004", "done")
def two_arrivals_without_a_wait(bad):
  def body(x, o, *, done):
    del x, o
    plgpu.barrier_arrive(done)
    if not bad:
      plgpu.barrier_wait(done)
    plgpu.barrier_arrive(done)  # HERE
    plgpu.barrier_wait(done)

  return body, dict(done=plgpu.Barrier(**ONE))


@case("DL004", "a", TWO_THREADS)
def a_wait_is_passed_over(bad):
  def body(x, o, *, a, b, go):
    del x, o

    @thread(0)
    def _arrives():
      for _ in range(5):
        plgpu.barrier_arrive(a)  # HERE
        plgpu.barrier_arrive(go)
        plgpu.barrier_wait(b)

    @thread(1)
    def _waits():
      for step in range(5):
        plgpu.barrier_wait(go)
        if not bad or step not in (1, 2):
          plgpu.barrier_wait(a)
        plgpu.barrier_arrive(b)

  return body, {name: plgpu.Barrier(**ONE) for name in ("a", "b", "go")}


@case("DL004", "done", TWO_THREADS)
def a_count_too_low(bad):
  def body(x, o, *, done, after):
    del x, o

    @thread(0)
    def _first():
      plgpu.barrier_arrive(done)
      plgpu.barrier_arrive(after)

    @thread(1)
    def _second():
      plgpu.barrier_wait(after)
      plgpu.barrier_arrive(done)  # HERE
      plgpu.barrier_wait(done)

  return body, dict(
      done=plgpu.Barrier(num_arrivals=1 if bad else 2, **ONE),
      after=plgpu.Barrier(**ONE),
  )


# DL005: cycles over cluster barriers and local ones.


def _peers(**arguments):
  return plgpu.ClusterBarrier(
      collective_axes=("block",), **{**ONE, **arguments}
  )


@case("DL005", "peers", {**TWO_THREADS, **TWO_BLOCKS})
def peers_before_the_own_block(bad):
  def body(x, o, *, local, peers):
    del x, o

    @thread(0)
    def _zero():
      if not bad:
        plgpu.barrier_arrive(local)
      plgpu.barrier_wait(peers)  # HERE
      if bad:
        plgpu.barrier_arrive(local)

    @thread(1)
    def _one():
      plgpu.barrier_wait(local)
      plgpu.barrier_arrive(peers)

  return body, dict(local=plgpu.Barrier(**ONE), peers=_peers())


@case("DL005", "peers", {**TWO_THREADS, **TWO_BLOCKS})
def a_step_behind(bad):
  def body(x, o, *, local, peers):
    del x, o

    @thread(0)
    def _zero():
      for step in range(2):
        if not bad or not step:
          plgpu.barrier_arrive(local)
        plgpu.barrier_wait(peers)  # HERE
        if bad and step:
          plgpu.barrier_arrive(local)

    @thread(1)
    def _one():
      for _ in range(2):
        plgpu.barrier_wait(local)
        plgpu.barrier_arrive(peers)

  return body, dict(local=plgpu.Barrier(**ONE), peers=_peers())


# DL006: collectives that not all enter.


@case("DL006", "peers", TWO_BLOCKS)
def a_block_is_absent(bad):
  def body(x, o, *, peers):
    del x, o

    @pl.when((lax.axis_index("block") == 0) | (not bad))
    def _enters():
      plgpu.barrier_arrive(peers)
      plgpu.barrier_wait(peers)  # HERE

  return body, dict(peers=_peers())


@case("DL006", "peers", TWO_BLOCKS)
def blocks_with_other_trip_counts(bad):
  def body(x, o, *, peers):
    del x, o
    last = jnp.where(lax.axis_index("block") == 1, 2 if bad else 3, 3)

    @pl.loop(0, last)
    def _step(step):
      del step
      plgpu.barrier_arrive(peers)
      plgpu.barrier_wait(peers)  # HERE

  return body, dict(peers=_peers())


@case("DL006", "peers[1]", TWO_BLOCKS)
def a_block_uses_another_barrier(bad):
  def body(x, o, *, peers):
    del x, o
    me = lax.axis_index("block")
    plgpu.barrier_arrive(peers.at[0])
    plgpu.barrier_wait(peers.at[0])

    @pl.when((me == 0) | (not bad))
    def _enters():
      plgpu.barrier_arrive(peers.at[1])
      plgpu.barrier_wait(peers.at[1])  # HERE

  return body, dict(peers=_peers(num_barriers=2))


# DL007: arrivals that are pending at the end.


@case("DL007", "done", TWO_THREADS)
def half_an_arrival_is_left(bad):
  def body(x, o, *, done):
    del x, o

    @pl.when((lax.axis_index("wg") == 0) | (not bad))
    def _arrives():
      plgpu.barrier_arrive(done)  # HERE

    if not bad:
      plgpu.barrier_wait(done)

  return body, dict(done=plgpu.Barrier(num_arrivals=2, **ONE))


@case("DL007", "inner")
def a_scope_ends_too_early(bad):
  def body(x, o):
    del x, o

    def scope(inner):
      plgpu.barrier_arrive(inner)  # HERE
      if not bad:
        plgpu.barrier_arrive(inner)
        plgpu.barrier_wait(inner)

    pl.run_scoped(scope, plgpu.Barrier(num_arrivals=2, **ONE))

  return body, {}


@case("DL007", "peers", TWO_BLOCKS)
def one_block_posts_and_leaves(bad):
  def body(x, o, *, peers):
    del x, o

    @pl.when((lax.axis_index("block") == 0) | (not bad))
    def _posts():
      plgpu.barrier_arrive(peers)  # HERE

    if not bad:
      plgpu.barrier_wait(peers)

  return body, dict(peers=_peers())


# DL009: no proof, but no end either.


@case("DL009", None, timeout_s=1.0)
def polls_memory(bad):
  def body(x, o):
    del o
    lax.while_loop(
        lambda n: (x[0] < 1) & ((n < 3) | bad), lambda n: n + 1, 0
    )

  return body, {}


@case("DL009", "done", TWO_THREADS, timeout_s=1.0)
def one_waits_while_the_other_polls(bad):
  def body(x, o, *, done):
    del o

    @thread(0)
    def _waits():
      plgpu.barrier_wait(done)

    @thread(1)
    def _polls():
      lax.while_loop(
          lambda n: (x[0] < 1) & ((n < 3) | bad), lambda n: n + 1, 0
      )
      plgpu.barrier_arrive(done)

  return body, dict(done=plgpu.Barrier(**ONE))
