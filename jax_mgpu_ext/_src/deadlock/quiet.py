"""Keeps JAX from showing the traces of its callbacks, once for each thread.

When a callback fails, JAX logs its trace, and so do all threads that are stopped
for it. Where the caller gets one exception that says it all, these are noise.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import logging
import threading

_LOGGER = logging.getLogger("jax._src.callback")
_lock = threading.Lock()
_depth = 0


def _is_no_trace(record: logging.LogRecord) -> bool:
  return not record.exc_info


@contextlib.contextmanager
def quiet() -> Iterator[None]:
  """Drops the traces of failed callbacks while the context is active."""
  global _depth
  with _lock:
    _depth += 1
    if _depth == 1:
      _LOGGER.addFilter(_is_no_trace)
  try:
    yield
  finally:
    with _lock:
      _depth -= 1
      if not _depth:
        _LOGGER.removeFilter(_is_no_trace)
