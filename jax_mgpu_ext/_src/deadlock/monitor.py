"""Follows the threads of an interpreted kernel, and sees when nobody runs.

The interpreter runs each thread of a kernel in a thread of Python and lets it wait
at a condition variable of the barrier. Whoever is about to wait there is counted
out, and counted in again by the arrival that completes the phase, under the same
lock. So the count of running threads is exact at each moment: when it becomes zero
and somebody is waiting, nothing can happen any more, and no clock has to say so.

`seams.py` tells what happens.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator
import contextlib
import itertools
import threading
from typing import Any

from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

from jax_mgpu_ext._src import errors
from jax_mgpu_ext._src.deadlock import events
from jax_mgpu_ext._src.deadlock import report as report_lib
from jax_mgpu_ext._src.deadlock import wait_graph

# The last events of a thread that a report shows.
_LAST_EVENTS = 8
# What happens in one of several threads, whichever is the last or the first.
_OF_ANYBODY = (events.ALLOCATE, events.COMPLETE, events.FREE)
ATTRIBUTE = "_mgpu_ext_state"
# Of this thread of Python: `unit` and `run`, the thread of the kernel that it last ran
# a callback for; `doing`, who arrives at a barrier, and at which line; `waiting`, who
# waits at one.
local = threading.local()
# Reports that a caller has not fetched yet, newest last.
_reports: collections.deque[report_lib.Report] = collections.deque(maxlen=16)
# What gets all events of the next kernels, for a timeline.
_recorders: list[list[Any]] = []


class Unit:
  """A thread of the kernel.

  Attributes:
    key: Device, block, warpgroup and warp.
    blocked: The barrier that it waits for, or None.
    source: The line that it is at.
    visits: Line -> how often it has waited there.
  """

  def __init__(self, key: wait_graph.ThreadKey):
    self.key = key
    self.blocked: BarrierState | None = None
    self.finished = False
    # How many of its warps have not finished; they run in its place.
    self.warps = 0
    self.parent: Unit | None = None
    # Whether `key` is certain.
    self.is_known = False
    self.source: Any = None
    self.grid: tuple[int, ...] = ()
    self.visits: collections.Counter[Any] = collections.Counter()
    self.scopes: collections.Counter[int] = collections.Counter()
    self.last: collections.deque[events.Event] = collections.deque(
        maxlen=_LAST_EVENTS
    )

  def see(self, logging_info: Any) -> None:
    """Notes where in the grid the thread is."""
    location = getattr(logging_info, "mesh_location", None)
    if location is not None:
      self.grid = tuple(map(int, location.cluster_coords))

  @property
  def runs(self) -> bool:
    return not (self.finished or self.warps or self.blocked is not None)


class BarrierState:
  """What is known of one barrier besides what the interpreter knows.

  Protected by the lock of the barrier's condition variable.
  """

  def __init__(self, barrier: Any, run: Run):
    self.barrier = barrier
    self.run = run
    self.key: tuple[int, ...] = ()
    self.name = ""
    self.array = ""
    self.kind = wait_graph.BARRIER
    self.device = 0
    self.block = 0
    self.scope: frozenset[int] | None = None
    self.arrived: dict[wait_graph.ThreadKey, int] = {}
    self.usual: dict[wait_graph.ThreadKey, int] = {}
    # Of each thread in all: its arrivals, and the lines of these.
    self.totals: dict[wait_graph.ThreadKey, int] = {}
    self.sources: dict[wait_graph.ThreadKey, dict[int, Any]] = {}
    self.holders: set[wait_graph.ThreadKey] = set()
    self.last_arrived: dict[wait_graph.ThreadKey, int] = {}

  def snapshot(self) -> wait_graph.Barrier:
    barrier = self.barrier
    scope = self.scope
    if scope is None:
      scope = frozenset((self.block,))
    return wait_graph.Barrier(
        key=self.key, name=self.name, array=self.array, kind=self.kind,
        device=self.device, block=self.block, phase=barrier.phase,
        have=barrier.arrivals_count, need=barrier.num_arrivals,
        arrived=dict(self.arrived), usual=dict(self.usual), scope=scope,
    )


class Run:
  """One interpreted kernel, from its first allocation to its end."""

  def __init__(self, memory: Any):
    self.memory = memory
    self.lock = threading.Lock()
    self.units: list[Unit] = []
    self.by_key: dict[wait_graph.ThreadKey, Unit] = {}
    self.barriers: list[BarrierState] = []
    self.numbers = itertools.count()
    self.cluster = 0
    self.failed = False
    self.recorders = tuple(_recorders)

  # What happens to threads.

  def add(self, unit: Unit) -> None:
    with self.lock:
      if not any(other is unit for other in self.units):
        self.units.append(unit)

  def know(self, unit: Unit) -> None:
    """Notes which thread of the kernel a unit is."""
    unit.is_known = True
    self.by_key[unit.key] = unit

  def finish(self, unit: Unit) -> errors.DeadlockError | None:
    """Counts a thread out for good."""
    with self.lock:
      if unit.finished:
        return None
      unit.finished = True
      unit.blocked = None
      if unit.parent is not None:
        unit.parent.warps -= 1
      self.record(events.FINISH, unit, None, 0, 0, None)
      return self._judge()

  def block(self, unit: Unit, state: BarrierState) -> errors.DeadlockError | None:
    """Counts a thread out that is about to wait."""
    with self.lock:
      unit.blocked = state
      return self._judge()

  def unblock(self, state: BarrierState) -> None:
    """Counts the threads in that waited for a barrier."""
    with self.lock:
      for unit in self.units:
        if unit.blocked is state:
          unit.blocked = None

  def next_cluster(self) -> None:
    with self.lock:
      self.cluster += 1
      self.units = [unit for unit in self.units if not unit.finished]
      # Other devices may be in the midst of a cluster of theirs.
      self.by_key = {unit.key: unit for unit in self.units if unit.is_known}
      self.barriers = [b for b in self.barriers if b.barrier.ref_count > 0]

  def record(self, kind, unit, state, phase, have, source) -> None:
    # Needs no lock: appending is one step, and no two events that depend on each
    # other are recorded at a time.
    event = events.Event(
        kind, unit.key, state, phase, have, source, self.cluster
    )
    if kind not in _OF_ANYBODY:
      unit.last.append(event)
    for recorder in self.recorders:
      recorder.append(event)

  # What it means.

  def _judge(self) -> errors.DeadlockError | None:
    if self.failed or any(unit.runs for unit in self.units):
      return None
    if not any(unit.blocked for unit in self.units):
      return None
    return self._fail(None)

  def picture(self) -> wait_graph.Picture:
    threads = []
    for unit in self.units:
      if unit.warps:
        continue  # They stand for it.
      state = "running"
      if unit.finished:
        state = "finished"
      elif unit.blocked is not None:
        state = "blocked"
      threads.append(
          wait_graph.Thread(
              key=unit.key, state=state,
              barrier=unit.blocked.key if unit.blocked else None,
          )
      )
    return wait_graph.Picture(
        threads=tuple(sorted(threads, key=lambda thread: thread.key)),
        barriers={
            state.key: state.snapshot() for state in self.barriers
        },
    )

  def _fail(
      self,
      code: str | None,
      problem: str = "",
      state: BarrierState | None = None,
      unit: Unit | None = None,
  ) -> errors.DeadlockError:
    self.failed = True
    report = report_lib.make(self, code, problem, state, unit)
    _reports.append(report)
    return errors.DeadlockError(report.summary, report=report)

  def explain(
      self, code: str, error: Exception, state: BarrierState, unit: Unit | None
  ) -> None:
    """Attaches a report to an exception of the interpreter."""
    with self.lock:
      if self.failed:
        return
      found = self._fail(code, str(error), state, unit)
    error.add_note(f"{found} (see jax_mgpu_ext.deadlock.last_report())")
    error.report = found.report

  def time_limit(self, timeout_s: float) -> None:
    """Ends the kernel, since it took too long; called by any thread."""
    with self.lock:
      if self.failed:
        return
      error = self._fail("DL009", f"no end after {timeout_s:g} s")
    self.memory.set_failed(error, None, top_level=False)


def key_of(thread: Any) -> wait_graph.ThreadKey:
  return (
      thread.device_id, thread.block_id, thread.warpgroup_id,
      getattr(thread, "warp_id", -1),
  )


def run_of(memory: Any) -> Run:
  run = getattr(memory, ATTRIBUTE, None)
  if run is None:
    run = Run(memory)
    setattr(memory, ATTRIBUTE, run)
  return run


def unit_of(run: Run, thread: Any) -> Unit:
  """Returns the thread of the kernel that a callback is for.

  Not the thread of Python that it happens to run in: XLA may take any of its own.
  """
  key = key_of(thread)
  unit = run.by_key.get(key)
  if unit is None:
    own = getattr(local, "unit", None)
    if (
        own is not None and getattr(local, "run", None) is run
        and not own.is_known and not own.finished
    ):
      unit = own  # On several devices, only its events tell which one it is.
      unit.key = key
    else:
      # A kernel of one thread runs where its caller does.
      unit = Unit(key)
      run.add(unit)
    run.know(unit)
  elif unit.finished:
    unit.finished = False  # The same, in the next cluster.
    run.add(unit)
  local.unit, local.run = unit, run
  return unit


def state_of(barrier: Any) -> BarrierState | None:
  """Returns what is known of a barrier; None if it is older than the hook."""
  return vars(barrier).get(ATTRIBUTE)


def source_of(logging_info: Any) -> Any:
  return getattr(logging_info, "source_info", None)


def reports() -> list[report_lib.Report]:
  """Returns the reports of the last kernels that hung, newest first."""
  return list(reversed(_reports))


@contextlib.contextmanager
def recording() -> Iterator[list[events.Event]]:
  """Collects the events of all kernels that begin while the context is active."""
  recorded: list[events.Event] = []
  _recorders.append(recorded)
  try:
    yield recorded
  finally:
    _recorders[:] = [r for r in _recorders if r is not recorded]


def threads_now() -> list[str] | None:
  """Returns a line for each thread of the kernel that runs now, or None."""
  memory = gpu_callbacks._shared_memory  # pylint: disable=protected-access
  if memory is None:
    return None
  run = run_of(memory)
  with run.lock:
    return report_lib.threads_now(run)


def time_limit(timeout_s: float) -> None:
  """Fails the kernel that runs now; called by any thread."""
  memory = gpu_callbacks._shared_memory  # pylint: disable=protected-access
  if memory is not None:
    run_of(memory).time_limit(timeout_s)
