"""The streams of the command line: what if nobody reads, and what is shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
import contextlib
import os
import re
import sys
from typing import Any, TYPE_CHECKING

from jax_mgpu_ext._src import texts

if TYPE_CHECKING:
  import rich.console


def give_up_output() -> int:
  """Keeps Python from complaining at exit that it cannot flush stdout."""
  _give_up(sys.stdout)
  return 128 + 13


def _give_up(stream: Any) -> None:
  nowhere = os.open(os.devnull, os.O_WRONLY)
  os.dup2(nowhere, stream.fileno())
  os.close(nowhere)


def complain(text: str) -> None:
  """Prints one line on stderr, if it can be written there at all."""
  try:
    print(printable(" ".join(text.split())), file=sys.stderr, flush=True)
  except OSError:  # Nobody reads it, or the disk is full.
    _give_up(sys.stderr)  # Python would end with a status of its own.


def printable(text: str, chars: int = texts.MESSAGE_CHARS) -> str:
  """Returns somebody's text so that it does a terminal no harm.

  Args:
    text: What may come from anywhere.
    chars: How much of it to show.

  Returns:
    It without its middle, if it is too long, and with what would move the
    cursor or change the terminal's colours in the form of escape sequences.
  """
  return "".join(
      char
      if char.isprintable() or char in "\n\t"
      else char.encode("unicode_escape").decode()
      for char in texts.shorten(text, chars)
  )


def mend() -> None:
  """Makes the standard streams exist, and take any text in any locale."""
  # First: a pipe or a file would get the number of a stream that was closed,
  # and be taken for it by native code and by child processes.
  for fd in range(3):
    try:
      os.fstat(fd)
    except OSError:
      opened = os.open(os.devnull, os.O_RDWR)  # The lowest that is free.
      assert opened == fd
      os.set_inheritable(fd, True)
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
def progress_bar(
    what: str = "checking",
) -> Iterator[Callable[[int, int], None]]:
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
    task = bar.add_task(what, total=None)

    def on_progress(done: int, total: int) -> None:
      bar.update(task, completed=done, total=total)

    yield on_progress
