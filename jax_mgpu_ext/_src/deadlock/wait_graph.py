"""Who waits for whom, and what that means: decided on a picture of a kernel.

The picture is taken at one moment: the threads of a kernel, each blocked,
finished or running, and its barriers with their arrivals. This module imports no
JAX, looks at no clock, and gives the same answer for the same picture.

A wait can be ended by the threads that may still arrive at its barrier. Known
ones have arrived there in an earlier phase, and not yet, or not as often, in this
one. Where nobody is known, those stand in that have arrived at other elements of
the same barrier array, and failing that every other thread that could. A wait that
nobody can end is starved; one that waits for itself through others is in a cycle.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
import dataclasses

# Device, block, warpgroup, and warp (-1 for the whole warpgroup).
ThreadKey = tuple[int, int, int, int]

BARRIER = "barrier"
CLUSTER_BARRIER = "cluster barrier"
NAMED_BARRIER = "named barrier"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Barrier:
  """One barrier, as it was at the moment of the picture.

  Attributes:
    key: Unique in the picture, and sortable.
    name: What the user calls it, as `ring.empty[2]`; blocks have one each.
    array: The name without the index, the same for all elements of an array.
    kind: `barrier`, `cluster barrier` or `named barrier`.
    device: The device it is on.
    block: The block whose threads wait for it.
    phase: How often it has completed.
    have: Arrivals of the phase that is not complete yet.
    need: Arrivals that complete a phase.
    arrived: Thread -> its arrivals in this phase, its copies' included.
    usual: Thread -> the most arrivals it made in one of the completed phases.
    scope: The blocks whose threads can arrive at it.
  """

  key: tuple[int, ...]
  name: str
  array: str
  kind: str
  device: int
  block: int
  phase: int
  have: int
  need: int
  arrived: Mapping[ThreadKey, int]
  usual: Mapping[ThreadKey, int]
  scope: frozenset[int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Thread:
  """One thread.

  Attributes:
    key: Which one.
    state: `blocked`, `finished` or `running`.
    barrier: Key of the barrier that it waits for, if it is blocked.
  """

  key: ThreadKey
  state: str
  barrier: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Picture:
  """All that is judged."""

  threads: tuple[Thread, ...]
  barriers: Mapping[tuple[int, ...], Barrier]

  def is_stuck(self) -> bool:
    """Returns whether nobody runs, and somebody is blocked."""
    states = {thread.state for thread in self.threads}
    return "blocked" in states and "running" not in states


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wait:
  """A blocked thread, its barrier, and who could end the wait.

  Attributes:
    candidates: Blocked threads that may still arrive at the barrier.
    known: Whether they have arrived there before.
    gone: Finished threads that used to arrive there, or at other elements of the
      array, and did not in this phase.
  """

  thread: ThreadKey
  barrier: Barrier
  candidates: tuple[ThreadKey, ...]
  known: bool
  gone: tuple[ThreadKey, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
  """Why nobody runs any more.

  Attributes:
    code: The catalog code: `DL001`, `DL002`, `DL003`, `DL005` or `DL006`.
    waits: The shortest cycle, each waiting for the next and the last for the
      first; or the one starved wait.
  """

  code: str
  waits: tuple[Wait, ...]


def judge(picture: Picture) -> Verdict | None:
  """Returns why nobody runs any more, or None if somebody does."""
  if not picture.is_stuck():
    return None
  found = waits(picture)
  by_thread = {wait.thread: wait for wait in found}
  cycle = _shortest_cycle({
      wait.thread: wait.candidates if wait.known else () for wait in found
  })
  if cycle is None:
    starved = [wait for wait in found if not wait.candidates]
    if starved:
      return _starved(min(starved, key=_severity), picture)
    cycle = _shortest_cycle({wait.thread: wait.candidates for wait in found})
  # Every wait has candidates, all of which wait: there is a cycle.
  cycle_waits = tuple(by_thread[key] for key in cycle or ())
  kinds = {wait.barrier.kind == CLUSTER_BARRIER for wait in cycle_waits}
  return Verdict(code="DL005" if len(kinds) > 1 else "DL001", waits=cycle_waits)


def _severity(wait: Wait) -> tuple[bool, bool, tuple[int, ...]]:
  """Sorts starved waits: those first of which most is known."""
  barrier = wait.barrier
  return (not barrier.have, not wait.gone, wait.thread)


def _starved(wait: Wait, picture: Picture) -> Verdict:
  barrier = wait.barrier
  here = [
      thread
      for thread in picture.threads
      if thread.key[0] == barrier.device and thread.key[1] in barrier.scope
  ]
  if len(here) > 1 and not barrier.have and not wait.gone and all(
      thread.barrier == barrier.key for thread in here
  ):
    # Whoever could arrive waits for the same: each for all.
    together = tuple(
        dataclasses.replace(wait, thread=thread.key) for thread in here
    )
    return Verdict(code="DL001", waits=together)
  if barrier.kind == NAMED_BARRIER:
    code = "DL006"
  elif barrier.kind == CLUSTER_BARRIER and _blocks_missing(barrier):
    code = "DL006"
  elif not barrier.phase and barrier.have and not wait.gone:
    # It never got what it needs, and all that arrived did so in this phase.
    code = "DL003"
  else:
    code = "DL002"
  return Verdict(code=code, waits=(wait,))


def _blocks_missing(barrier: Barrier) -> frozenset[int]:
  """Returns the blocks of which no thread has arrived in this phase."""
  return barrier.scope - {key[1] for key in barrier.arrived}


def waits(picture: Picture) -> list[Wait]:
  """Returns what each blocked thread waits for, and who could end that."""
  blocked = {
      thread.key: thread.barrier
      for thread in picture.threads
      if thread.state == "blocked"
  }
  finished = {t.key for t in picture.threads if t.state == "finished"}
  # Who has arrived at any element of an array.
  arrivers: dict[tuple[int, str, int], set[ThreadKey]] = {}
  for barrier in picture.barriers.values():
    of_array = arrivers.setdefault(
        (barrier.device, barrier.array, barrier.block), set()
    )
    of_array.update(barrier.arrived, barrier.usual)
  found = []
  for key, barrier_key in sorted(blocked.items()):
    if barrier_key is None:
      continue
    barrier = picture.barriers[barrier_key]
    missing = {
        thread
        for thread, usual in barrier.usual.items()
        if barrier.arrived.get(thread, 0) < usual
    }
    known = bool(missing)
    gone = missing & finished
    if not known:
      siblings = arrivers[barrier.device, barrier.array, barrier.block]
      missing = siblings - set(barrier.arrived)
      gone = missing & finished
      if not missing:
        missing = {
            thread
            for thread in [*blocked, *finished]
            if thread[0] == barrier.device
            and thread[1] in barrier.scope
            and thread not in barrier.arrived
        }
    found.append(
        Wait(
            thread=key,
            barrier=barrier,
            candidates=tuple(sorted(
                thread
                for thread in missing
                if thread in blocked and thread != key
                # Who waits for the same completion cannot bring it about.
                and (known or blocked[thread] != barrier_key)
            )),
            known=known,
            gone=tuple(sorted(gone)),
        )
    )
  return found


def _shortest_cycle(
    edges: Mapping[ThreadKey, Iterable[ThreadKey]],
) -> list[ThreadKey] | None:
  """Returns a shortest cycle, the first in order of those, or None."""
  best: list[ThreadKey] | None = None
  for start in sorted(edges):
    # Breadth first, back to the start.
    came_from: dict[ThreadKey, ThreadKey] = {}
    level = [start]
    found = None
    while level and found is None:
      following = []
      for node in level:
        for neighbour in edges.get(node, ()):
          if neighbour == start:
            found = node
            break
          if neighbour not in came_from and neighbour in edges:
            came_from[neighbour] = node
            following.append(neighbour)
        if found is not None:
          break
      level = following
    if found is None:
      continue
    cycle = [found]
    while cycle[-1] != start:
      cycle.append(came_from[cycle[-1]])
    cycle.reverse()
    if best is None or len(cycle) < len(best):
      best = cycle
  return best
