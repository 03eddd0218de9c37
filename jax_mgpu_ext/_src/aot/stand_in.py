"""Lets a program be traced as if a target were the machine's only GPU.

Mosaic asks the default device for its architecture, and some kernels ask
`jax.devices()` or `jax.local_devices()` for the number of multiprocessors while
they are traced. In the thread that traces, and only there, all of these give the
target.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import functools
import threading
from typing import Any

_local = threading.local()
_lock = threading.Lock()
_users = 0
_originals: dict[str, Any] = {}


@contextlib.contextmanager
def device(device: Any) -> Iterator[None]:
  """Makes a device the only one of this thread.

  Args:
    device: A device of `toolchain.device`.
  """
  import jax  # pylint: disable=g-import-not-at-top

  global _users
  with _lock:
    if _users == 0:
      _replace(jax)
    _users += 1
  before = getattr(_local, "device", None)
  _local.device = device
  try:
    # Part of the key of JAX's caches of traces.
    with jax.default_device(device):
      yield
  finally:
    _local.device = before
    with _lock:
      _users -= 1
      if _users == 0:
        _restore(jax)


def _replace(jax: Any) -> None:
  """Puts our functions, which know the thread, in the place of JAX's."""
  answers = {
      "devices": lambda device: [device],
      "local_devices": lambda device: [device],
      "device_count": lambda device: 1,
      "local_device_count": lambda device: 1,
      "default_backend": lambda device: device.platform,
  }
  for name, answer in answers.items():
    original = getattr(jax, name)
    _originals[name] = original
    setattr(jax, name, _wrap(original, answer))


def _wrap(original, answer):
  @functools.wraps(original)
  def wrapped(*args, **kwargs):
    device = getattr(_local, "device", None)
    # A backend that is asked for by name is that of the machine.
    if device is None or args or kwargs:
      return original(*args, **kwargs)
    return answer(device)

  return wrapped


def _restore(jax: Any) -> None:
  for name, original in _originals.items():
    setattr(jax, name, original)
  _originals.clear()
