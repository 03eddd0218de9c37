"""What happened in an interpreted kernel, one record for each step."""

from __future__ import annotations

from typing import Any, NamedTuple

ARRIVE = "arrive"
COMPLETE = "complete"
WAIT = "wait"
RESUME = "resume"
COPY = "copy"
LANDED = "landed"
ALLOCATE = "allocate"
FREE = "free"
FINISH = "finish"


class Event(NamedTuple):
  """One synchronization event.

  Attributes:
    kind: One of the names above.
    thread: Device, block, warpgroup, and warp (-1 for the whole warpgroup).
    barrier: The `monitor.BarrierState` that it is about, or None.
    phase: Of the barrier: the one that is arrived at, completed or awaited.
    have: Arrivals of that phase, this one included.
    source: JAX's `SourceInfo` of the line, or None.
    cluster: Which cluster of the grid, in the order of execution.
  """

  kind: str
  thread: tuple[int, int, int, int]
  barrier: Any
  phase: int
  have: int
  source: Any
  cluster: int
