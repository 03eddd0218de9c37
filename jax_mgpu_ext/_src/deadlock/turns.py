"""One interpreted kernel at a time.

The interpreter keeps the memory of the kernel that it runs in a global variable, and
kernels that different threads of Python call would write over each other's.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

# A kernel that ended without giving its turn back, and of which nothing was heard
# for so long, is gone. In seconds.
_GONE_S = 120.0
_changed = threading.Condition()


class _Turn:
  """The turn of one kernel, on one device or several."""

  def __init__(self, num_devices: int):
    self.num_devices = num_devices
    self.joined = 1
    self.owner = threading.get_ident()
    self.began_s = self.heard_s = time.monotonic()


_turn: _Turn | None = None
# When a thread of any kernel last began to wait; of `time.monotonic`.
last_heard_s = 0.0


def heard() -> None:
  """Notes that the kernel whose turn it is does something."""
  global last_heard_s
  last_heard_s = time.monotonic()
  if _turn is not None:
    _turn.heard_s = last_heard_s


def initialize(original, *, num_gpus: Any, **kwargs: Any) -> Any:
  """Waits until no other kernel runs, then begins."""
  global _turn
  if not hasattr(gpu_callbacks._clear_shared_memory, "__wrapped__"):  # pylint: disable=protected-access
    # The hook was there when the kernel was traced, and nobody would give the turn
    # back.
    return original(num_gpus=num_gpus, **kwargs)
  num_devices = int(num_gpus)
  with _changed:
    while (turn := _turn) is not None:
      if turn.joined < turn.num_devices == num_devices:
        turn.joined += 1
        return original(num_gpus=num_gpus, **kwargs)
      if (
          num_devices == 1 and turn.owner == threading.get_ident()
          or time.monotonic() - turn.heard_s > _GONE_S
      ):
        # Whoever had it is not there any more: its caller is here.
        gpu_callbacks._shared_memory = None  # pylint: disable=protected-access
        break
      _changed.wait(1.0)
    _turn = _Turn(num_devices)
  return original(num_gpus=num_gpus, **kwargs)


def release(original) -> Any:
  """Ends a kernel, and lets the next one begin."""
  global _turn
  result = original()
  with _changed:
    _turn = None
    _changed.notify_all()
  return result


def remaining_s(caller: int, others: set[int], timeout_s: float) -> float | None:
  """Returns how long a caller's kernel may still run, or None: it does not yet.

  Args:
    caller: Identifier of the Python thread that called it.
    others: Those of other callers.
    timeout_s: How long it may run in all.
  """
  turn = _turn
  if turn is None:
    return None
  if turn.owner != caller:
    started = {thread.ident for thread in threading.enumerate()
               if not isinstance(thread, threading._DummyThread)}  # pylint: disable=protected-access
    if others or turn.owner in started:
      return None
  return turn.began_s + timeout_s - time.monotonic()
