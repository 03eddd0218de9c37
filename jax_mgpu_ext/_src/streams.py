"""The streams of the command line: what if nobody reads, and how wide."""

from __future__ import annotations

from collections.abc import Callable, Iterator
import contextlib
import os
import re
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
  import rich.console


def give_up_output() -> int:
  """Keeps Python from complaining at exit that it cannot flush stdout."""
  nowhere = os.open(os.devnull, os.O_WRONLY)
  os.dup2(nowhere, sys.stdout.fileno())
  os.close(nowhere)
  return 128 + 13


def mend() -> None:
  """Makes stdout and stderr take any text, whatever the locale."""
  for name in ("stdout", "stderr"):
    stream = getattr(sys, name)
    if stream is None:  # Closed by whoever started us.
      setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
    elif hasattr(stream, "reconfigure"):
      stream.reconfigure(errors="backslashreplace")


@contextlib.contextmanager
def nothing_else_on_stdout() -> Iterator[None]:
  """Sends what JAX and native code print meanwhile to stderr."""
  sys.stdout.flush()
  saved = os.dup(1)
  os.dup2(2, 1)
  try:
    yield
  finally:
    sys.stdout.flush()
    os.dup2(saved, 1)
    os.close(saved)


class _WithoutPadding:
  """A text stream that drops the blanks that tables end their lines with."""

  def __init__(self, stream):
    self._stream = stream

  def __getattr__(self, name: str):
    return getattr(self._stream, name)

  def write(self, text: str) -> int:
    return self._stream.write(re.sub(" +$", "", text, flags=re.MULTILINE))


def console() -> rich.console.Console:
  """Returns a rich console for stdout.

  What is piped is not folded at some width: it goes to a file, or to a program
  that looks at lines.
  """
  import rich.console

  class Console(rich.console.Console):

    def on_broken_pipe(self):
      raise  # pylint: disable=misplaced-bare-raise

  if sys.stdout.isatty():
    return Console(highlight=False, emoji=False)
  return Console(
      file=_WithoutPadding(sys.stdout),
      width=10_000,
      highlight=False,
      emoji=False,
  )


@contextlib.contextmanager
def progress_bar() -> Iterator[Callable[[int, int], None]]:
  """Shows a bar on stderr; yields what to tell how many of how many are done."""
  from rich import console as rich_console
  from rich import progress

  columns = (
      progress.TextColumn("{task.description}"),
      progress.BarColumn(),
      progress.MofNCompleteColumn(),
      progress.TimeElapsedColumn(),
  )
  with progress.Progress(
      *columns, console=rich_console.Console(stderr=True), transient=True
  ) as bar:
    task = bar.add_task("checking", total=None)

    def on_progress(done: int, total: int) -> None:
      bar.update(task, completed=done, total=total)

    yield on_progress
