"""Child processes that carry out requests, seen from the parent.

Requests go down one pipe and events come up another, as lines of JSON; what the
child prints is kept apart. `child_server` is the other side.

Every child runs below a guard (`programs`): it always ends as a whole, with
whatever it started, at the latest with the parent, and Ctrl-C at a terminal
reaches only the parent, which then ends it.
"""

from __future__ import annotations

from collections.abc import Mapping
import errno
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from typing import Any

from jax_mgpu_ext._src import programs

_DIAGNOSIS_S = 2.0
# How often to look whether the child still lives: its end of the pipe may be
# open in a process that it started. Also below what `poll` takes, 24 days.
_LOOK_S = 1.0

# `-P` keeps the current folder off the path, where a file `random.py` would
# hide the standard library's; the root comes last, for those who did not
# install the package.
_BOOT = """\
import importlib, sys
sys.path.append(sys.argv[1])
module = importlib.import_module(sys.argv[2])
module.main(int(sys.argv[3]), int(sys.argv[4]))
"""
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))


class ChildDied(Exception):
  """The child's process ended by itself; the text says how."""


class ChildTimeout(Exception):
  """The child said nothing within the time limit.

  Attributes:
    lines: What its threads were doing, as far as it could tell.
  """

  def __init__(self, lines: list[str]):
    super().__init__("time limit")
    self.lines = lines


class Child:
  """A child process that runs the `main` of a module of ours.

  Attributes:
    output_bytes: How much of what it prints is kept: the last part.
  """

  output_bytes = 4096

  def __init__(
      self, module: str, *, env: Mapping[str, str], folder: str = ""
  ):
    """Starts it.

    Args:
      module: The module, by its full name.
      env: Environment variables that it gets beside those of this process.
      folder: A folder to remove when it has ended.

    Raises:
      OSError: The system does not let us.
    """
    self._unread = b""
    self._output = b""
    self._output_lock = threading.Lock()
    self._kill_lock = threading.Lock()
    request_read, self._request_fd = programs.pipe()
    self._event_fd, event_write = programs.pipe()
    try:
      self._program = programs.Program(
          [
              sys.executable, "-u", "-P", "-c", _BOOT,
              _ROOT, module, str(request_read), str(event_write),
          ],
          stdin=subprocess.DEVNULL,
          stdout=subprocess.PIPE,
          stderr=subprocess.STDOUT,
          pass_fds=(request_read, event_write),
          env={**os.environ, **env},
          folder=folder,
      )
    except BaseException:
      os.close(self._request_fd)
      os.close(self._event_fd)
      raise
    finally:
      os.close(request_read)
      os.close(event_write)
    self._process = self._program.process
    self._drain = threading.Thread(target=self._keep_output, daemon=True)
    self._drain.start()

  def _keep_output(self) -> None:
    assert self._process.stdout is not None
    while data := os.read(self._process.stdout.fileno(), 65536):
      with self._output_lock:
        self._output = (self._output + data)[-self.output_bytes :]

  def request(self, do: str, **fields: Any) -> None:
    """Sends a request; a child that has ended is noticed at `event`."""
    try:
      os.write(
          self._request_fd, (json.dumps({"do": do, **fields}) + "\n").encode()
      )
    except OSError as e:
      if e.errno not in (errno.EPIPE, errno.EBADF):
        raise

  def event(self, deadline: float) -> dict[str, Any]:
    """Waits for the next event.

    Args:
      deadline: Until when, on the clock of `time.monotonic`.

    Returns:
      The event.

    Raises:
      ChildDied: If the process ended.
      ChildTimeout: If nothing came in time; the child should be killed.
    """
    event = self._read(deadline)
    if event is None:
      # The parent's clock may have run out while the answer was on its way.
      self.request("diagnose")
      until = time.monotonic() + _DIAGNOSIS_S
      while (late := self._read(until)) is not None:
        if late["event"] == "diagnosis":
          raise ChildTimeout(late["lines"])
      raise ChildTimeout([])
    return event

  def _read(self, deadline: float) -> dict[str, Any] | None:
    if self._event_fd < 0:
      raise ChildDied("it was ended")
    poll = select.poll()
    poll.register(self._event_fd, select.POLLIN)
    while b"\n" not in self._unread:
      if self._event_fd < 0:  # Another thread has closed it.
        raise ChildDied("it was ended")
      left_s = deadline - time.monotonic()
      if left_s <= 0:
        return None
      if not poll.poll(min(left_s, _LOOK_S) * 1000):
        if self.has_ended() and not poll.poll(0):
          raise ChildDied(self._ending())
        continue
      try:
        data = os.read(self._event_fd, 65536)
      except OSError as e:  # Another thread has closed it.
        raise ChildDied("it was ended") from e
      if not data:
        raise ChildDied(self._ending())
      self._unread += data
    line, _, self._unread = self._unread.partition(b"\n")
    return json.loads(line)

  def has_ended(self) -> bool:
    """Returns whether the process has ended, by itself or by somebody else."""
    return self._process.poll() is not None

  def wait_for_end(self, timeout_s: float) -> None:
    """Waits until the process has ended by itself, or the time is up."""
    try:
      self._process.wait(timeout=timeout_s)
    except subprocess.TimeoutExpired:
      pass

  def _ending(self) -> str:
    try:  # It may still be ending what it started.
      self._process.wait(timeout=_LOOK_S)
    except subprocess.TimeoutExpired:
      self.kill()
      return "the process closed its connection to the command"
    self.kill()
    code = self._process.returncode
    if code >= 0:
      return f"the process ended with exit status {code}"
    try:
      return f"the process was ended by {signal.Signals(-code).name}"
    except ValueError:
      return f"the process was ended by signal {-code}"

  def take_output(self) -> str:
    """Returns the end of what was printed since the last call."""
    # What was printed before an event is in the pipe, but maybe not read yet.
    self._drain.join(0.05)
    with self._output_lock:
      output, self._output = self._output, b""
    return output.decode(errors="replace").strip()

  def hang_up(self) -> None:
    """Starts to kill the child, without waiting for its end."""
    with self._kill_lock:
      self._program.hang_up()

  def kill(self) -> None:
    """Ends the process and all that it started; may be called again."""
    with self._kill_lock:
      self._program.end()
    self._drain.join(1.0)

  def close(self) -> None:
    """Kills the child, and gives its file descriptors back; may be repeated."""
    self.kill()
    with self._kill_lock:
      if not self._drain.is_alive():  # Else somebody who got away prints.
        self._process.stdout.close()
      fds = [fd for fd in (self._request_fd, self._event_fd) if fd >= 0]
      self._request_fd = self._event_fd = -1
      for fd in fds:
        os.close(fd)
