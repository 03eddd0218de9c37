"""Makes a hang in JAX's GPU interpreter an error with a report.

The interpreter waits at condition variables without a limit, so a kernel whose
barriers do not match waits for ever. Here the threads that run are counted, and
when none is left the kernel fails, by the interpreter's own way of failing. Kernels
of several Python threads, which would share one memory, take turns.
"""

from __future__ import annotations

import concurrent.futures
import functools
import sys
from typing import Any

from jax_mgpu_ext._src.hooks import contract

_MEMORY = "jax._src.pallas.mosaic_gpu.interpret.shared_memory"
_THREADS = "jax._src.pallas.mosaic.interpret.thread_map"
_CALLBACKS = "jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks"
_INTERPRETER = "jax._src.pallas.mosaic_gpu.interpret.jaxpr_interpret"


def _target(name: str, module: str = _MEMORY) -> contract.Target:
  return contract.Target(module=module, name=name)


# Target -> the function of `deadlock/seams.py` that gets the original first.
_METHODS = {
    _target("Barrier.__init__"): "barrier_init",
    _target("Barrier.arrive"): "arrive",
    _target("Barrier._wait"): "wait",
    _target("GPUSharedMemory.allocate_barrier"): "allocate_barrier",
    _target("GPUSharedMemory.allocate_cluster_barrier"): (
        "allocate_cluster_barrier"
    ),
    _target("GPUSharedMemory.deallocate_barrier"): "deallocate",
    _target("GPUSharedMemory.deallocate_cluster_barrier"): "deallocate",
    _target("GPUSharedMemory.assert_no_barriers_allocated"): (
        "assert_no_barriers_allocated"
    ),
    _target("GPUSharedMemory.execute_async_task"): "execute_async_task",
    _target("GPUSharedMemory.kernel_thread_finished"): "kernel_thread_finished",
    _target("GPUSharedMemory.named_barrier"): "named_barrier",
    _target("GPUSharedMemory.reset_per_cluster_state"): (
        "reset_per_cluster_state"
    ),
    _target("JaxprInterpreter._interpret_run_scoped_p", _INTERPRETER): (
        "interpret_run_scoped"
    ),
}
# The same for `deadlock/gaps.py`.
_GAPS = {
    _target("_get_barrier_allocation_key_from_inval", _INTERPRETER): (
        "barrier_key"
    ),
    _target("GPUSharedMemory.get_barrier"): "get_barrier",
    _target("GPUSharedMemory.get_barrier_and_increment_clock"): "get_barrier",
}
# The same for `deadlock/turns.py`.
_TURNS = {
    _target("_initialize_shared_memory", _CALLBACKS): "initialize",
    _target("_clear_shared_memory", _CALLBACKS): "release",
    _target("reset_gpu_interpret_mode_state", _CALLBACKS): "release",
}


# Named here for the guard alone: what replaces the threads it starts must fit.
_THREAD_MAP = _target("_thread_map_callback", _THREADS)
_INHERITED = {
    _target(f"GPUSharedMemory.{name}"): name
    for name in ("set_failed", "check_failed")
}
_ARRIVALS = _target("Barrier.arrivals_count")


def _seams():
  # Loaded when a kernel is first interpreted, not when JAX is imported.
  from jax_mgpu_ext._src.deadlock import seams  # pylint: disable=g-import-not-at-top

  return seams


def _executor():
  from jax_mgpu_ext._src.deadlock import executor  # pylint: disable=g-import-not-at-top

  return executor


def _gaps():
  from jax_mgpu_ext._src.deadlock import gaps  # pylint: disable=g-import-not-at-top

  return gaps


def _turns():
  from jax_mgpu_ext._src.deadlock import turns  # pylint: disable=g-import-not-at-top

  return turns


def _wrapper(name: str, load=_seams):
  def wrap(original):
    found = None

    @functools.wraps(original)
    def function(*args, **kwargs):
      nonlocal found
      if found is None:  # Called for every event of a kernel.
        found = getattr(load(), name)
      return found(original, *args, **kwargs)

    return function

  return wrap


def _inheriting(name: str):
  """Wraps a method that the class itself does not have."""
  def wrap(original):
    del original  # There is none.

    def method(self, *args, **kwargs):
      inherited = getattr(super(type(self), self), name)
      return getattr(_seams(), name)(inherited, self, *args, **kwargs)

    return method

  return wrap


class _ArrivalsCount:
  """The attribute `arrivals_count` of barriers; JAX sets it under their lock."""

  _set = None

  def __get__(self, barrier, owner=None):
    return self if barrier is None else vars(barrier).get("arrivals_count", 0)

  def __set__(self, barrier, value):
    if self._set is None:
      self._set = _seams().set_arrivals
    self._set(barrier, value)


class _Futures:
  """Stands for the module `concurrent.futures` where threads are started."""

  def __getattr__(self, name: str) -> Any:
    if name == "ThreadPoolExecutor":
      return _executor().Executor
    return getattr(concurrent.futures, name)


def _apply(ledger) -> None:
  for target, name in _METHODS.items():
    ledger.replace(target, _wrapper(name))
  for target, name in _GAPS.items():
    ledger.replace(target, _wrapper(name, _gaps))
  for target, name in _TURNS.items():
    ledger.replace(target, _wrapper(name, _turns))
  for target, name in _INHERITED.items():
    ledger.replace(target, _inheriting(name))
  ledger.set_attr(_ARRIVALS.owner(), _ARRIVALS.attribute, _ArrivalsCount())
  ledger.set_attr(sys.modules[_THREADS], "futures", _Futures())


HOOK = contract.Hook(
    slug="interpret_deadlock",
    why=(
        "A kernel that hangs in interpret mode fails, with a report of who waits"
        " for what, instead of waiting for ever"
    ),
    codes=(
        "DL001", "DL002", "DL003", "DL004", "DL005", "DL006", "DL007", "DL009",
    ),
    targets=(*_METHODS, *_GAPS, *_TURNS, *_INHERITED, _ARRIVALS, _THREAD_MAP),
    apply=_apply,
    since="0.11.2",
    before="its interpreter has no way to end threads that wait at a barrier",
    native=contract.Target(
        module=_MEMORY, name="GPUSharedMemory._check_deadlock"
    ),
)
