"""The child's side of `children`: reads requests, carries them out, sends events.

Requests and events are lines of JSON on two pipes of their own: standard output
and error belong to whatever code the requests run.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
from typing import Any


class Server:
  """Carries out one request after the other.

  A request is a dict with the key "do". `{"do": "diagnose"}` is answered while
  another one is carried out, by the event "diagnosis" with "lines".
  """

  def __init__(self, request_fd: int, event_fd: int):
    for fd in (request_fd, event_fd):
      os.set_inheritable(fd, False)
    self._request_fd = request_fd
    self._event_fd = event_fd
    self._send_lock = threading.Lock()
    self._requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    self._pid = os.getpid()

  def carry_out(self, request: dict[str, Any]) -> None:
    """Carries out a request; sends events."""
    raise NotImplementedError

  def diagnose(self) -> list[str]:
    """Returns what the threads that carry out a request are doing."""
    return []

  def serve(self) -> None:
    """Never returns: the process ends when the parent closes its end."""
    # A thread reads, so that a parent that died is noticed, and a diagnosis
    # can be given, even while a request hangs.
    threading.Thread(target=self._read, daemon=True).start()
    while True:
      self.carry_out(self.next_request())

  def next_request(self) -> dict[str, Any]:
    """Waits for the next request."""
    return self._requests.get()

  def _read(self) -> None:
    with os.fdopen(self._request_fd) as requests:
      for line in requests:
        request = json.loads(line)
        if request["do"] == "diagnose":
          try:
            lines = self.diagnose()
          except Exception:  # pylint: disable=broad-exception-caught
            lines = []  # The thread that asks must live on.
          self.send("diagnosis", lines=lines)
        else:
          self._requests.put(request)
    # The parent has gone, so everything that the requests started goes, too.
    if os.getpgrp() == self._pid:
      os.killpg(self._pid, signal.SIGKILL)
    os._exit(1)

  def send(self, event: str, **fields: Any) -> None:
    """Sends an event to the parent."""
    if os.getpid() != self._pid:
      # Somebody's code forked, and the copy came all the way back here.
      os._exit(0)
    data = (json.dumps({"event": event, **fields}) + "\n").encode()
    with self._send_lock:
      while data:
        data = data[os.write(self._event_fd, data) :]


def flush() -> None:
  """Flushes the standard streams, if they are still there."""
  for stream in (sys.stdout, sys.stderr):
    try:
      stream.flush()
    except (AttributeError, OSError, ValueError):  # Somebody closed it.
      pass
