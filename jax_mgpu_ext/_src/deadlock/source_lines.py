"""Which line of the user's an event belongs to."""

from __future__ import annotations

import os
from typing import Any

from jax._src import source_info_util

# The methods of composite specs stand between the user's line and JAX's.
_OWN = os.path.join(
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "specs"
) + os.sep

_METHODS = (
    "copy_in", "producer_acquire", "producer_commit", "producer_tail",
    "consumer_wait", "consumer_release",
)


def line_of(source: Any) -> str | None:
  """Returns `file.py:12 (consumer)`, or with a ring's method, of a `SourceInfo`.

  Paths below the current folder are relative to it.
  """
  if source is None or source.traceback is None:
    return None
  method = ""
  # All frames, innermost first: ours are none of the user's, for JAX either.
  for code, instruction in zip(*source.traceback.raw_frames()):
    if source_info_util.is_user_filename(code.co_filename):
      frame = source_info_util.raw_frame_to_frame(code, instruction)
      function = frame.function_name.rpartition(".")[2]
      place = f"{_relative(frame.file_name)}:{frame.start_line}"
      return f"{place} ({function}{method})"
    if code.co_filename.startswith(_OWN) and code.co_name in _METHODS:
      method = f", {code.co_name}"
  return None


def _relative(path: str) -> str:
  try:
    return path.removeprefix(os.getcwd() + os.sep)
  except OSError:  # There is no such folder any more.
    return path
