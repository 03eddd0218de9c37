"""What takes the place of JAX's functions in its GPU interpreter.

Each function gets the original first, and then what that would get. They only tell
the monitor what happens; `hooks/interpret_deadlock.py` puts them in place.
"""

from __future__ import annotations

import threading
from typing import Any

from jax._src import source_info_util
from jax._src.pallas.mosaic_gpu import core as mosaic_gpu_core
import numpy as np

from jax_mgpu_ext._src.deadlock import events
from jax_mgpu_ext._src.deadlock import gaps
from jax_mgpu_ext._src.deadlock import monitor
from jax_mgpu_ext._src.deadlock import turns
from jax_mgpu_ext._src.deadlock import wait_graph


class _Condition(threading.Condition):
  """The condition variable of one barrier."""

  def __init__(self, state: monitor.BarrierState):
    super().__init__()
    self._state = state

  def wait(self, timeout=None):
    # With the lock of the condition held: an arrival comes before or after.
    state = self._state
    if not state.barrier.aborted:
      unit = getattr(monitor.local, "waiting", None)
      if unit is not None and unit.blocked is None:
        error = state.run.block(unit, state)
        if error is not None:
          raise error
    return super().wait(timeout)

  def notify_all(self):
    self._state.run.unblock(self._state)
    super().notify_all()


def barrier_init(original, self, *args, **kwargs):
  memory = args[0] if args else kwargs["shared_memory"]
  run = monitor.run_of(memory)
  state = monitor.BarrierState(self, run)
  vars(self)[monitor.ATTRIBUTE] = state
  original(self, *args, **kwargs)
  self.cv = _Condition(state)
  with run.lock:
    state.key = (next(run.numbers),)
    run.barriers.append(state)


def set_arrivals(barrier, value):
  """Sets `arrivals_count` of a barrier, and sees who arrives.

  JAX only sets it with the lock of the barrier held.
  """
  before = vars(barrier).get("arrivals_count", 0)
  vars(barrier)["arrivals_count"] = value
  doing = getattr(monitor.local, "doing", None)
  state = monitor.state_of(barrier)
  if doing is None or state is None:
    return
  unit, source = doing
  key = unit.key
  if value == before + 1:
    state.arrived[key] = state.arrived.get(key, 0) + 1
    state.totals[key] = state.totals.get(key, 0) + 1
    state.sources.setdefault(key, {})[id(source)] = source
    state.run.record(events.ARRIVE, unit, state, barrier.phase, value, source)
  elif before and not value:
    for thread, times in state.arrived.items():
      state.usual[thread] = max(times, state.usual.get(thread, 0))
    state.last_arrived, state.arrived = state.arrived, {}
    # The interpreter counts the phase before it counts the arrivals again.
    state.run.record(
        events.COMPLETE, unit, state, barrier.phase - 1, before, source
    )


def arrive(original, self, thread, clock=None, logging_info=None):
  state = monitor.state_of(self)
  if state is None or thread is None:
    return original(self, thread, clock, logging_info)
  run = state.run
  unit = monitor.unit_of(run, thread)
  before = getattr(monitor.local, "doing", None)
  unit.source = monitor.source_of(logging_info) or unit.source
  unit.see(logging_info)
  monitor.local.doing = (unit, monitor.source_of(logging_info))
  try:
    return original(self, thread, clock, logging_info)
  except ValueError as e:
    run.explain("DL004", e, state, unit)
    raise
  finally:
    monitor.local.doing = before


def wait(original, self, thread, logging_info=None):
  state = monitor.state_of(self)
  if state is None:
    return original(self, thread, logging_info)
  run = state.run
  unit = monitor.unit_of(run, thread)
  source = monitor.source_of(logging_info)
  unit.source = source
  unit.see(logging_info)
  unit.visits[id(source)] += 1
  turns.heard()
  awaited = self.last_observed_phase_by_thread.get(thread, 0)
  run.record(events.WAIT, unit, state, awaited, 0, source)
  monitor.local.waiting = unit
  try:
    result = original(self, thread, logging_info)
  except ValueError as e:
    run.explain("DL004", e, state, unit)
    raise
  finally:
    monitor.local.waiting = None
  run.record(events.RESUME, unit, state, awaited, 0, source)
  return result


def reset_per_cluster_state(original, self):
  original(self)
  monitor.run_of(self).next_cluster()


def kernel_thread_finished(original, self, thread):
  original(self, thread)
  run = monitor.run_of(self)
  error = run.finish(monitor.unit_of(run, thread))
  if error is not None:
    raise error


def set_failed(inherited, self, exception, *args, **kwargs):
  run = monitor.run_of(self)
  with run.lock:
    run.failed = True
  try:
    return inherited(exception, *args, **kwargs)
  finally:
    # JAX wakes who waits at the barriers that the program has allocated.
    for barrier in list(self.named_barriers.values()):
      barrier.abort()


def check_failed(inherited, self):
  turns.heard()  # Every callback of a kernel asks.
  return inherited()


def allocate_barrier(original, self, key, *args, **kwargs):
  original(self, key, *args, **kwargs)
  _name(self, key, kwargs, [self.mem[key]])


def allocate_cluster_barrier(original, self, key, *args, **kwargs):
  original(self, key, *args, **kwargs)
  cluster_barrier = self.mem[key]
  _name(self, key, kwargs, cluster_barrier.barriers, cluster_barrier)


def _name(memory, key, arguments, barriers, cluster_barrier=None) -> None:
  """Gives a barrier that was allocated the name of its ref."""
  run = monitor.run_of(memory)
  info = arguments.get("logging_info")
  source = monitor.source_of(info)
  unit = monitor.unit_of(run, info.thread) if info is not None else None
  leaves = getattr(source, "leaves", None)
  name, array = f"barrier {key.buffer_id}", f"barrier {key.buffer_id}"
  if leaves and unit is not None:
    count = unit.scopes[id(source)]
    unit.scopes[id(source)] += 1
    name, array = _leaf(leaves, count)
  for block, barrier in enumerate(barriers):
    state = monitor.state_of(barrier)
    if unit is not None:
      state.holders.add(unit.key)
    if state.name:
      continue
    state.name, state.array, state.device = name, array, key.device_id
    if cluster_barrier is None:
      state.block = key.block_id
    else:
      state.kind, state.block = wait_graph.CLUSTER_BARRIER, block
      state.scope = _scope(cluster_barrier, block)
    if unit is not None:
      run.record(events.ALLOCATE, unit, state, 0, 0, source)


def _leaf(leaves: Any, count: int) -> tuple[str, str]:
  """Returns the name of the count-th barrier of a scope, and of its array."""
  total = sum(int(np.prod(shape)) for _, shape in leaves)
  count %= total
  for name, shape in leaves:
    size = int(np.prod(shape))
    if count < size:
      if not shape:
        return name, name
      index = ", ".join(map(str, np.unravel_index(count, shape)))
      return f"{name}[{index}]", name
    count -= size
  raise AssertionError(f"{count} is past the end of {leaves}")


def _scope(cluster_barrier: Any, block: int) -> frozenset[int]:
  """Returns the blocks whose arrivals the barrier of a block counts."""
  dims = cluster_barrier.axes_dims[:-1]
  own = np.unravel_index(block, dims) if dims else ()
  found = {block}
  for axis, is_collective in enumerate(cluster_barrier.is_axis_collective[:-1]):
    if is_collective:
      for place in range(dims[axis]):
        coordinates = [*own]
        coordinates[axis] = place
        found.add(int(np.ravel_multi_index(coordinates, dims)))
  return frozenset(found)


def named_barrier(original, self, thread, barrier_id, num_arrivals):
  barrier = original(self, thread, barrier_id, num_arrivals)
  state = monitor.state_of(barrier)
  if not state.name:
    state.name = state.array = f"named barrier {barrier_id}"
    state.kind, state.block = wait_graph.NAMED_BARRIER, thread.block_id
    state.device = thread.device_id
  return barrier


def deallocate(original, self, key, *args, **kwargs):
  run = monitor.run_of(self)
  barrier = self.mem.get(key)
  # An argument of its own only from 0.12.0 on.
  unit = monitor.unit_of(run, kwargs["logging_info"].thread)
  try:
    original(self, key, *args, **kwargs)
  except ValueError as e:
    if "arrivals pending" in str(e):
      for found in getattr(barrier, "barriers", [barrier]):
        if found.arrivals_count:
          run.explain("DL007", e, monitor.state_of(found), unit)
    raise
  if key not in self.mem:
    for found in getattr(barrier, "barriers", [barrier]):
      run.record(events.FREE, unit, monitor.state_of(found), found.phase, 0, None)


def assert_no_barriers_allocated(original, self):
  """Explains a barrier that only some of the threads have allocated."""
  try:
    original(self)
  except AssertionError as e:
    if self.num_devices > 1:
      # It asks for those of all devices, of which others may still run.
      return
    run = monitor.run_of(self)
    for allocation in self.mem.values():
      barrier = getattr(allocation, "barriers", [allocation])[0]
      if (state := monitor.state_of(barrier)) is not None:
        run.explain("DL006", e, state, None)
        break
    raise


def execute_async_task(original, self, task):
  run = monitor.run_of(self)
  barrier = getattr(task, "barrier", None)
  if getattr(task, "src_access", None) is None:
    return original(self, task)
  unit = monitor.unit_of(run, task.thread)
  state = monitor.state_of(barrier) if barrier is not None else None
  source = getattr(task, "source_info", None)
  phase = barrier.phase if barrier is not None else 0
  run.record(events.COPY, unit, state, phase, 0, source)
  result = original(self, task)
  run.record(events.LANDED, unit, state, phase, 0, source)
  return result


def interpret_run_scoped(original, self, eqn, token, get_invals):
  """Carries the names of refs to where their barriers are allocated."""
  jaxpr = eqn.params["jaxpr"]
  info = jaxpr.debug_info
  names = getattr(info, "arg_names", None) or ()
  if len(names) != len(jaxpr.invars):
    names = [f"ref {i}" for i in range(len(jaxpr.invars))]
  leaves = []
  for name, var in zip(names, jaxpr.invars):
    dtype = getattr(var.aval, "dtype", None)
    if isinstance(
        dtype,
        (mosaic_gpu_core.BarrierType, mosaic_gpu_core.ClusterBarrierType),
    ):
      leaves.append((name or "a barrier", tuple(var.aval.shape)))
  if leaves:
    source = ScopeInfo(eqn.source_info.traceback, eqn.source_info.name_stack)
    source.leaves = tuple(leaves)
    eqn = eqn.replace(source_info=source)
  with gaps.Scope([var.aval for var in jaxpr.invars]):
    return original(self, eqn, token, get_invals)


class ScopeInfo(source_info_util.SourceInfo):
  """The line of a `pl.run_scoped`, and the barriers that it allocates.

  Attributes:
    leaves: (name, shape) of each ref that holds barriers.
  """

  __slots__ = ("leaves",)
