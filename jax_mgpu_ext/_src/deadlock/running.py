"""Runs a function with interpreted kernels, and tells how it ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
import contextlib
import math
import os
import sys
import threading
from typing import Any

import jax
from jax._src import dispatch

from jax_mgpu_ext._src import errors
from jax_mgpu_ext._src import hooks
from jax_mgpu_ext._src import texts
from jax_mgpu_ext._src.deadlock import quiet
from jax_mgpu_ext._src.deadlock import report as report_lib


def run(
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float | None = None,
    **kwargs: Any,
) -> Any:
  """Calls a function, waits for its results, and raises hangs as they are.

  JAX raises what goes wrong in an interpreted kernel with the traces of its own
  machinery around it; this raises the `DeadlockError` alone.

  Args:
    function: Calls kernels in interpret mode; may be jitted.
    *args: Its arguments.
    timeout_s: Seconds after which a kernel that still runs fails with DL009, a
      deadlock that is only suspected; None: no limit.
    **kwargs: Its keyword arguments.

  Returns:
    What the function returns.

  Raises:
    ValueError: `timeout_s` is no time.
    DeadlockError: A kernel came to a state that it can never leave.
  """
  if timeout_s is not None and not (
      isinstance(timeout_s, (int, float)) and 0 < timeout_s < math.inf
  ):
    raise ValueError(
        f"expected a positive number of seconds, got timeout_s={timeout_s!r}"
    )
  before = reports()
  with quiet.quiet(), _time_limit(timeout_s):
    try:
      return jax.block_until_ready(function(*args, **kwargs))
    except Exception as e:
      if "KeyboardInterrupt" in texts.text_of(e):
        # Ctrl-C came while a callback ran, and JAX took it for its failure.
        raise KeyboardInterrupt from None
      found = report_of(e, before)
      if found is not None:
        # The failed kernel's token, on which JAX would make the next one wait.
        dispatch.runtime_tokens.clear()
      if found is None or isinstance(e, errors.DeadlockError):
        raise
      raise errors.DeadlockError(found.summary, found) from None


@contextlib.contextmanager
def trace(path: str | os.PathLike[str]) -> Iterator[None]:
  """Writes the timeline of the kernels that are interpreted in the context.

  Also if one of them hangs. Kernels of other threads are in it, too.

  Args:
    path: A file, replaced if it is there: a picture if its name ends in `.png`
      (which needs the extra `plot`), else a Chrome trace for
      https://ui.perfetto.dev.

  Raises:
    ImportError: A picture is asked for, and matplotlib is not installed.
    OSError: The file cannot be written.
    UsageError: The hook `interpret_deadlock` is not there, which sees the events.
  """
  for status in hooks.status():
    if status.slug == "interpret_deadlock" and status.state not in (
        "applied", "pending"
    ):
      raise errors.UsageError(
          "a timeline needs the hook interpret_deadlock, which is"
          f" {status.state!r}: {status.reason or 'not activated'}"
      )
  from jax_mgpu_ext._src.deadlock import monitor  # pylint: disable=g-import-not-at-top
  from jax_mgpu_ext._src.deadlock import timeline  # pylint: disable=g-import-not-at-top

  timeline.check_path(path)
  with monitor.recording() as recorded:
    try:
      yield
    except BaseException as e:
      try:
        timeline.write(timeline.build(list(recorded)), path)
      except OSError as own:
        e.add_note(f"its timeline could not be written: {own}")
      raise
    timeline.write(timeline.build(list(recorded)), path)


def last_report() -> report_lib.Report | None:
  """Returns the report of the last kernel that hung, or None."""
  found = reports()
  return found[0] if found else None


def report_of(
    error: BaseException, before: list[report_lib.Report] | None = None
) -> report_lib.Report | None:
  """Returns the report behind an exception that came out of a kernel.

  Args:
    error: What the caller of the kernel got.
    before: The reports that there were before it was called.
  """
  if (found := getattr(error, "report", None)) is not None:
    return found if isinstance(found, report_lib.Report) else None
  text = texts.text_of(error)
  old = {id(report) for report in before or ()}
  new = [report for report in reports() if id(report) not in old]
  # Kernels of other threads may have hung meanwhile.
  for report in new:
    if report.summary in text or report.said and report.said in text:
      return report
  return None


def reports() -> list[report_lib.Report]:
  """Returns the reports of the last kernels that hung, newest first."""
  monitor = sys.modules.get("jax_mgpu_ext._src.deadlock.monitor")
  return [] if monitor is None else monitor.reports()


def threads_now() -> list[str] | None:
  """Returns a line for each thread of the kernel that runs, or None."""
  monitor = sys.modules.get("jax_mgpu_ext._src.deadlock.monitor")
  return None if monitor is None else monitor.threads_now()


# The Python threads that are in `run`.
_callers: set[int] = set()


@contextlib.contextmanager
def _time_limit(timeout_s: float | None) -> Iterator[None]:
  """Fails the kernel of this thread, if it runs for longer."""
  caller = threading.get_ident()
  ended = threading.Event()

  def watch():
    wait_s = timeout_s
    while not ended.wait(wait_s):
      wait_s = 0.1
      monitor = sys.modules.get("jax_mgpu_ext._src.deadlock.monitor")
      turns = sys.modules.get("jax_mgpu_ext._src.deadlock.turns")
      if monitor is None or turns is None:
        continue  # No kernel has been interpreted yet.
      left_s = turns.remaining_s(caller, _callers - {caller}, timeout_s)
      if left_s is not None:
        if left_s <= 0:
          monitor.time_limit(timeout_s)
          return
        wait_s = min(left_s, 1.0)

  _callers.add(caller)
  if timeout_s is not None:
    threading.Thread(target=watch, daemon=True).start()
  try:
    yield
  finally:
    ended.set()
    _callers.discard(caller)
