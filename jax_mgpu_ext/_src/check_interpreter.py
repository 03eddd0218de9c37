"""What happens inside JAX's GPU interpreter while it runs a kernel.

The interpreter runs the threads of a kernel in callbacks, and what goes wrong
there reaches the caller as text, if at all: the runtime drops the exception,
releases before 0.12 only print a race, and a thread that waits for ever says
nothing. This module gets hold of all three, on every supported release.
"""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
import logging
import os
import re
import sys
import traceback
from types import FrameType, TracebackType
from typing import Any

from jax._src import source_info_util
from jax._src.pallas.mosaic import interpret as shared_interpret
from jax._src.pallas.mosaic_gpu import core as mosaic_gpu_core
from jax._src.pallas.mosaic_gpu import interpret as gpu_interpret
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax._src.pallas.mosaic_gpu.interpret import params as interpret_params
from jax._src.pallas.mosaic_gpu.interpret import shared_memory

from jax_mgpu_ext._src import deadlock
from jax_mgpu_ext._src import texts
from jax_mgpu_ext._src.deadlock import running

_RACE = "RACE DETECTED"
_FOLDERS = tuple(
    os.path.dirname(module.__file__) + os.sep
    # The last one says for JAX what it does not say itself.
    for module in (shared_interpret, gpu_interpret, deadlock)
)
# The interpreter's own function that reads a buffer.
_get = gpu_callbacks._get
# The interpreter of JAX 0.10.2 has no clusters.
_HAS_CLUSTERS = "block_id" in (
    field.name for field in dataclasses.fields(gpu_callbacks.HostAllocationKey)
)
# Read only by `waiting_threads`, which runs while a kernel hangs.
_failures: list[BaseException] = []


def parameters(*, detect_races: bool) -> Any:
  """Returns the value for `interpret=` that turns the GPU interpreter on."""
  return interpret_params.InterpretGPUParams(detect_races=detect_races)


def _get_of_cluster(token, mesh, thread, key, transforms, *args, **kwargs):
  """Reads a buffer, that of another block of the cluster if the ref says so.

  The interpreter keeps the SMEM of each block by the number of the block, and
  refuses `plgpu.cluster_ref` only since it does not know what it means. A read
  from a block that has left fails; all reads are checked for races.
  """
  own = []
  for transform in transforms:
    if (
        isinstance(transform, mosaic_gpu_core.ClusterRefTransform)
        and len(transform.idxs) == 1
    ):
      (block,) = transform.idxs
      key = dataclasses.replace(
          gpu_callbacks.HostAllocationKey.from_array(key), block_id=int(block)
      ).as_np_array
    else:
      own.append(transform)
  return _get(token, mesh, thread, key, tuple(own), *args, **kwargs)


class _Collector(logging.Handler):
  """Keeps races and failed callbacks, and lets other messages through."""

  def __init__(self):
    super().__init__()
    self.races: list[str] = []

  def emit(self, record: logging.LogRecord) -> None:
    try:
      text = record.getMessage()
    except Exception:  # Its arguments do not fit. pylint: disable=broad-exception-caught
      self.handleError(record)
      return
    error = record.exc_info[1] if record.exc_info else None
    if _RACE in text:
      self.races.append(text)
    elif error is not None and record.name == "jax._src.callback":
      _failures.append(error)
    elif record.levelno >= logging.WARNING:
      print(self.format(record), file=sys.stderr)


class _Output:
  """Stands for `sys.stdout`, where releases before 0.12 print races."""

  def __init__(self, stream: Any, races: list[str]):
    self._stream = stream
    self._races = races

  def write(self, text: str) -> int:
    if _RACE not in text:
      return self._stream.write(text)
    self._races.append(text)
    return len(text)

  def __getattr__(self, name: str) -> Any:
    return getattr(self._stream, name)


class Watch:
  """Collects what the interpreter reports while the context is active.

  Attributes:
    races: The interpreter's text for each race it found.
  """

  def __enter__(self) -> Watch:
    _failures.clear()
    self._reports = running.reports()
    gpu_callbacks.reset_gpu_interpret_mode_state()
    self._collector = _Collector()
    self.races = self._collector.races
    # The callbacks' logger must not propagate, or the traceback is shown
    # twice; the root logger needs a handler, or `logging.warning` makes one.
    self._callback_logger = logging.getLogger("jax._src.callback")
    self._propagate = self._callback_logger.propagate
    self._callback_logger.propagate = False
    self._callback_logger.addHandler(self._collector)
    logging.getLogger().addHandler(self._collector)
    if _HAS_CLUSTERS:
      gpu_callbacks._get = _get_of_cluster
    self._stdout = sys.stdout
    sys.stdout = _Output(self._stdout, self.races)
    return self

  def __exit__(self, *unused: Any) -> None:
    sys.stdout = self._stdout
    gpu_callbacks._get = _get
    logging.getLogger().removeHandler(self._collector)
    self._callback_logger.removeHandler(self._collector)
    self._callback_logger.propagate = self._propagate

  def cause(self, error: BaseException) -> BaseException:
    """Returns the exception behind `error`, which the caller got."""
    # Threads that fail after the first one only say that another has failed.
    return _failures[0] if _failures else error

  def report(self, error: BaseException) -> Any:
    """Returns the `deadlock.Report` behind `error`, or None."""
    return running.report_of(self.cause(error), self._reports) or (
        running.report_of(error, self._reports)
    )

  def race(self, error: BaseException | None = None) -> str | None:
    """Returns the text of the first race, or None if there is none."""
    if error is not None and _RACE in (text := texts.text_of(error)):
      return _without_clocks(text)
    if self.races:
      return _without_clocks(self.races[0])
    try:
      found = gpu_callbacks.get_races().races_found
    except AssertionError:  # Nothing was interpreted.
      found = False
    return _RACE if found else None


def _without_clocks(text: str) -> str:
  lines = text.strip().split("\n")
  return "\n".join(line for line in lines if "clock: " not in line)


def summarize_race(text: str) -> str:
  """Puts a race into one line: which two accesses, and where they stand."""
  accesses = re.findall(
      r"^\s*(read|write) of .*?(\S+:\d+(?::\d+)? \([^)\n]*\))", text, re.M
  )
  places = [f"{kind} at {_shorten(place)}" for kind, place in accesses]
  return f"race: {' and '.join(places)}" if places else "race"


def unsupported(error: BaseException) -> str | None:
  """Returns why the interpreter cannot run the kernel, or None if it can.

  Only the interpreter's own word counts: the exception comes out of its code,
  and says that something is not supported. Everything else is a failure.
  """
  frames = list(traceback.walk_tb(error.__traceback__))
  if not frames or not frames[-1][0].f_code.co_filename.startswith(_FOLDERS):
    return None
  text = texts.text_of(error)
  if re.search(r"Collective axis `\(.*not found among axes", text):
    return "its cluster barriers have no groups of axes"
  said = re.search(r"not (\(?yet\)? )?(supported|implemented)", text, re.I)
  if not isinstance(error, NotImplementedError) and not (
      isinstance(error, (AssertionError, ValueError)) and said
  ):
    return None
  if "cluster_barrier" in text:
    # 0.10.2, which takes the barrier for a buffer and cannot fill it.
    return "it has no cluster barriers"
  return text.strip() or type(error).__name__


def place_of(trace: TracebackType | None) -> str | None:
  """Returns the line of the kernel at which a callback failed, or None."""
  for frame, _ in reversed(list(traceback.walk_tb(trace))):
    if (place := _place(frame)) is not None:
      return place
  return None


def waiting_threads() -> list[str]:
  """Returns a line for each thread of the kernel that waits at a barrier.

  Called from another thread while a kernel seems to hang. Starts with the first
  failure of a callback, if there is one: in releases before 0.11 one thread's
  exception leaves the others waiting.
  """
  lines = [f"failed: {_first_line(error)}" for error in _failures[:1]]
  if (known := running.threads_now()) is not None:
    return lines + known
  waits = []
  for frame in sys._current_frames().values():
    for inner in _outwards(frame):
      if (
          inner.f_code.co_filename == shared_memory.__file__
          and inner.f_code.co_name in ("wait", "_wait")
          and "logging_info" in inner.f_locals
      ):
        waits.append(_describe_wait(inner))
        break
  return lines + sorted(waits)


def _describe_wait(frame: FrameType) -> str:
  info, barrier = frame.f_locals["logging_info"], frame.f_locals["self"]
  thread = getattr(info, "thread", None)
  if thread is not None:
    who = f"block {thread.block_id}, warpgroup {thread.warpgroup_id}"
  else:
    who = f"thread {getattr(info, 'thread_id', '?')}"
  where = _place(frame) or "an unknown line"
  arrived = getattr(barrier, "arrivals_count", "?")
  wanted = getattr(barrier, "num_arrivals", "?")
  return f"{who} waits at {where}: {arrived} of {wanted} arrivals"


def _place(frame: FrameType) -> str | None:
  """Returns the line of the kernel that a frame of the interpreter serves."""
  info = frame.f_locals.get("source_info")
  if info is None:
    info = getattr(frame.f_locals.get("logging_info"), "source_info", None)
  if not isinstance(info, source_info_util.SourceInfo):
    return None
  return _shorten(source_info_util.summarize(info)) or None


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
  while frame is not None:
    yield frame
    frame = frame.f_back


def _shorten(place: str) -> str:
  """Makes a path relative to the current folder, if it is below it."""
  try:
    return place.removeprefix(os.getcwd() + os.sep)
  except OSError:  # There is no such folder any more.
    return place


def _first_line(error: BaseException) -> str:
  text = texts.text_of(error).strip().split("\n")[0]
  return f"{type(error).__name__}: {text}" if text else type(error).__name__
