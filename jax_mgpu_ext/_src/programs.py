"""Runs programs that may hang, and ends them with all that they started.

Each program gets a guard: a small process between it and us, which is this file
run as a script. The guard holds one end of a pipe, the lifeline. When the other
end is closed, by us or because we are gone, however that came about, the guard
kills the program and everything that came from it. No program has to help with
that: one that never lets go of Python's lock is ended, too.

On Linux that includes what has left the program's process group and session,
and the program ends even if somebody kills the guard. Elsewhere what leaves the
group is left behind.

Imports only the standard library, since guards run without anything else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import contextlib
import fcntl
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

# The longest wait that is left to the system, which takes no more than 24 days.
MAX_WAIT_S = 3600.0
# How long a guard may take to end a program: one that is stuck inside a driver
# does not even die of SIGKILL.
_END_S = 5.0

# From <linux/prctl.h>.
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36


class Program:
  """A program that runs below a guard.

  Attributes:
    process: The guard; it ends as the program does, with the same status.
  """

  def __init__(
      self,
      command: Sequence[str],
      *,
      pass_fds: Sequence[int] = (),
      folder: str = "",
      **options: Any,
  ):
    """Starts a program.

    Args:
      command: The program and its arguments.
      pass_fds: File descriptors for the program, above 2.
      folder: A folder to remove when all has ended, however that came about.
      **options: For `subprocess.Popen`.

    Raises:
      OSError: There is no such program.
    """
    if shutil.which(command[0]) is None:
      raise FileNotFoundError(f"there is no program {command[0]!r}")
    lifeline, self._lifeline = pipe()
    try:
      self.process = subprocess.Popen(
          [
              sys.executable, "-I", "-S", __file__,
              str(lifeline), ",".join(map(str, pass_fds)), folder, *command,
          ],
          pass_fds=(lifeline, *pass_fds),
          # Ctrl-C at a terminal is for us alone.
          start_new_session=True,
          **options,
      )
    except BaseException:
      os.close(self._lifeline)
      raise
    finally:
      os.close(lifeline)

  def hang_up(self) -> None:
    """Has the program ended, without waiting for it; may be called again."""
    if self._lifeline >= 0:
      os.close(self._lifeline)
      self._lifeline = -1

  def end(self) -> None:
    """Ends the program and all that it started; may be called again."""
    self.hang_up()
    try:
      self.process.wait(timeout=_END_S)
    except subprocess.TimeoutExpired:
      self.process.kill()
      with contextlib.suppress(subprocess.TimeoutExpired):
        self.process.wait(timeout=2)


def pipe() -> tuple[int, int]:
  """Returns the ends for reading and writing of a pipe.

  Neither is 0, 1 or 2, even if these are free since somebody closed them: a
  child has its standard streams there.
  """
  read, write = os.pipe()
  return _above_streams(read), _above_streams(write)


def _above_streams(fd: int) -> int:
  if fd > 2:
    return fd
  moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
  os.close(fd)
  return moved


@contextlib.contextmanager
def started(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
  """Starts a program with its output in pipes, and ends it with the block.

  Raises:
    OSError: There is no such program.
  """
  program = Program(
      command,
      stdin=subprocess.DEVNULL,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
      errors="replace",
  )
  try:
    yield program.process
  finally:
    program.end()
    program.process.stdout.close()
    program.process.stderr.close()


def communicate(
    process: subprocess.Popen[str], timeout_s: float
) -> tuple[str, str]:
  """Returns what a program prints on stdout and stderr, once it has ended.

  Args:
    process: What `started()` gave.
    timeout_s: How long to wait, in seconds; any number.

  Raises:
    subprocess.TimeoutExpired: If it has not ended by then.
  """
  deadline = time.monotonic() + timeout_s
  while True:
    left_s = max(deadline - time.monotonic(), 0)
    try:
      return process.communicate(timeout=min(left_s, MAX_WAIT_S))
    except subprocess.TimeoutExpired:
      if left_s <= MAX_WAIT_S:
        raise


def output_of(command: Sequence[str], timeout_s: float = 15.0) -> str:
  """Returns what a program prints, empty if it fails or takes too long."""
  try:
    with started(command) as process:
      output, _ = communicate(process, timeout_s)
  except (OSError, subprocess.TimeoutExpired):
    return ""
  return output if process.returncode == 0 else ""


def num_cores() -> int:
  """Returns how many cores this process may use."""
  if hasattr(os, "sched_getaffinity"):  # Not on macOS.
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


# From here on: what runs as the guard.


def _guard(
    lifeline: int, passed_fds: Sequence[int], folder: str, command: Sequence[str]
):
  """Runs a command, and ends all of it with the lifeline; never returns."""
  # Orphans of the program then become children of this process.
  _prctl(_PR_SET_CHILD_SUBREAPER, 1)
  # Whoever started us may ignore it, which goes on to us, and loses statuses.
  signal.signal(signal.SIGCHLD, signal.SIG_DFL)
  guard = os.getpid()
  child = os.fork()
  if child == 0:
    _become(command, guard, lifeline)
  for fd in passed_fds:
    os.close(fd)
  status = _watch(child, lifeline)
  if folder:
    shutil.rmtree(folder, ignore_errors=True)
  os._exit(_end_as(status))


def _become(command: Sequence[str], guard: int, lifeline: int):
  """Becomes the program; never returns."""
  try:
    # If somebody kills the guard, nobody else would end the program.
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guard:  # It happened before we could say so.
      os._exit(1)
    os.close(lifeline)
    # A group of its own, that can be killed at once and without the guard.
    os.setsid()
    # Python ignores these two, which an ordinary program must not inherit.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
      signal.signal(number, signal.SIG_DFL)
    os.execvp(command[0], command)
  except OSError as error:
    os.write(2, f"cannot run {command[0]!r}: {error.strerror}\n".encode())
  finally:
    os._exit(127)


def _watch(child: int, lifeline: int) -> int:
  """Waits for the end of a program or of the lifeline.

  Returns:
    The program's status, as of `os.waitpid`; all that it started has ended.
  """
  wake_read, wake_write = os.pipe()
  for fd in (wake_read, wake_write):
    os.set_blocking(fd, False)
  signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
  ends = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
  for number in (signal.SIGCHLD, *ends):
    signal.signal(number, lambda *unused: None)
  while True:
    while True:
      pid, status = os.waitpid(-1, os.WNOHANG)
      if pid == child:
        _end_all(child)
        return status
      if pid == 0:
        break
    ready, _, _ = select.select([lifeline, wake_read], [], [])
    if lifeline in ready or set(ends) & set(os.read(wake_read, 4096)):
      with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(child, signal.SIGKILL)  # Maybe before it has its group.
      return _end_all(child)


def _end_all(child: int) -> int:
  """Kills a program's group, and all that has become a child of the guard."""
  # Also if it has just been waited for: numbers are not used again that soon.
  with contextlib.suppress(ProcessLookupError, PermissionError):
    os.killpg(child, signal.SIGKILL)
  child_status = 0
  while True:  # Each death may bring us further orphans.
    for pid in _children():
      with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)
    try:
      pid, status = os.waitpid(-1, 0)
    except ChildProcessError:
      return child_status
    if pid == child:
      child_status = status


def _children() -> Iterator[int]:
  """Yields the children of this process; none where there is no /proc."""
  try:
    names = os.listdir("/proc")
  except OSError:
    return
  for name in filter(str.isdecimal, names):
    with contextlib.suppress(OSError, ValueError, IndexError):
      with open(f"/proc/{name}/stat", "rb") as file:
        # Number, (name), state, parent; the name may hold anything.
        fields = file.read().rpartition(b")")[2].split()
      if int(fields[1]) == os.getpid():
        yield int(name)


def _end_as(status: int) -> int:
  """Ends as the program did by a signal, else returns its exit status."""
  code = os.waitstatus_to_exitcode(status)
  if code >= 0:
    return code
  _prctl(_PR_SET_DUMPABLE, 0)  # One core dump is enough.
  with contextlib.suppress(OSError):  # Of SIGKILL there is no handler.
    signal.signal(-code, signal.SIG_DFL)
  os.kill(os.getpid(), -code)
  return 128 - code


def die_with_parent() -> None:
  """Has this process end with the one that started it, on Linux."""
  _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
  """Sets a property of this process, where the system has it."""
  if sys.platform != "linux":
    return
  try:
    import ctypes  # Not in every build of Python. pylint: disable=g-import-not-at-top

    zero = ctypes.c_ulong(0)
    ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), zero, zero, zero)
  except (ImportError, OSError, AttributeError):
    pass


if __name__ == "__main__":
  _guard(
      int(sys.argv[1]),
      [int(fd) for fd in sys.argv[2].split(",") if fd],
      sys.argv[3],
      sys.argv[4:],
  )
