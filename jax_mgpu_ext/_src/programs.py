"""Runs programs that may hang, and gives up on them in time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import contextlib
import os
import signal
import subprocess


@contextlib.contextmanager
def started(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
  """Starts a program with its output in pipes, and ends it with the block.

  Raises:
    OSError: There is no such program.
  """
  process = subprocess.Popen(
      command,
      stdin=subprocess.DEVNULL,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
      errors="replace",
      start_new_session=True,  # So that its own children end with it.
  )
  try:
    yield process
  finally:
    # Its pipes are open unless it was heard to the end. Even if it has ended
    # then, a child of its own may live on and hold them.
    if not process.stdout.closed:
      with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
      # A program that is stuck inside a driver does not even die of that.
      with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=2)
    process.stdout.close()
    process.stderr.close()


def output_of(command: Sequence[str], timeout_s: float = 15.0) -> str:
  """Returns what a program prints, empty if it fails or takes too long."""
  try:
    with started(command) as process:
      output, _ = process.communicate(timeout=timeout_s)
  except (OSError, subprocess.TimeoutExpired):
    return ""
  return output if process.returncode == 0 else ""
