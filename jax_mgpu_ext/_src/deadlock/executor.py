"""Starts the threads of an interpreted kernel, and tells the monitor of them."""

from __future__ import annotations

from concurrent import futures
import sys

from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

from jax_mgpu_ext._src.deadlock import monitor


class Executor(futures.ThreadPoolExecutor):
  """Runs the threads of a kernel, or the warps of a thread."""

  def __init__(self, max_workers):
    super().__init__(max_workers=max_workers)
    memory = gpu_callbacks._shared_memory  # pylint: disable=protected-access
    # The interpreter for TPUs starts its threads by the same function.
    caller = sys._getframe(1).f_locals  # pylint: disable=protected-access
    if caller.get("on_exception") is not gpu_callbacks.fail:
      memory = None
    self._run = None if memory is None else monitor.run_of(memory)
    self._units: list[monitor.Unit] = []
    self._parent = None
    if self._run is None:
      return
    if getattr(monitor.local, "run", None) is self._run:
      parent = getattr(monitor.local, "unit", None)
      self._parent = parent if parent is not None and not parent.finished else None
    with self._run.lock:
      is_certain = memory.num_devices == 1 and (
          self._parent is not None or not any(
              not unit.finished for unit in self._run.units
          )
      )
    for index in range(max_workers):
      if self._parent is not None:
        key = (*self._parent.key[:3], index)
      else:
        per_block = memory.num_pallas_threads_per_block
        key = (0, index // per_block, index % per_block, -1)
      unit = monitor.Unit(key)
      unit.parent = self._parent
      self._units.append(unit)
      if is_certain:
        self._run.know(unit)
    with self._run.lock:
      # All at once: whoever has not started runs, as far as others can see.
      self._run.units.extend(self._units)
      if self._parent is not None:
        self._parent.warps = max_workers
    self._next = iter(self._units)

  def submit(self, function, /, *args, **kwargs):
    if self._run is None:
      return super().submit(function, *args, **kwargs)
    return super().submit(self._call, next(self._next), function, *args, **kwargs)

  def _call(self, unit, function, *args, **kwargs):
    monitor.local.unit, monitor.local.run = unit, self._run
    try:
      return function(*args, **kwargs)
    finally:
      monitor.local.unit = monitor.local.run = None
      error = self._run.finish(unit)
      if error is not None:
        # No lock is held here, and nobody hears an exception before all have
        # ended.
        self._run.memory.set_failed(error, None, top_level=False)

  def __exit__(self, kind, *unused):
    if self._run is not None and kind is not None:
      # Ctrl-C, before all were started: those that were would wait for ever.
      for unit in self._next:
        self._run.finish(unit)
      self._run.memory.set_failed(
          RuntimeError("the kernel was interrupted"), None, top_level=False
      )
    super().__exit__(kind, *unused)
    if self._run is not None and self._parent is not None:
      with self._run.lock:
        gone = set(map(id, self._units))
        self._run.units = [u for u in self._run.units if id(u) not in gone]
        for unit in self._units:
          if self._run.by_key.get(unit.key) is unit:
            del self._run.by_key[unit.key]
