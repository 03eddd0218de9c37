"""The child process that imports a source and checks its cases.

It reads requests and writes events as lines of JSON, on two pipes of their own:
standard output and error belong to the code of the cases. A worker serves one
source for all its life, so that no module of one source meets those of another.

Requests, from the parent:
  {"do": "load", "source": {...}}                      once, first
  {"do": "run", "module": ..., "case": ..., "stages": [...]}
  {"do": "diagnose"}                                   while a case runs
Events:
  {"event": "loaded", "cases": [...]} or {"event": "unusable", "message": ...}
  {"event": "start", "stage": ...}, {"event": "stage", "result": {...}}, and
  {"event": "done", "clean": ...} at the end of a case, which says whether the
  worker is fit for another case
  {"event": "diagnosis", "lines": [...]}
"""

from __future__ import annotations

import dataclasses
import faulthandler
import importlib
import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
from typing import Any

from jax_mgpu_ext._src import check_cases
from jax_mgpu_ext._src import check_sources
from jax_mgpu_ext._src.check_cases import KernelCase
from jax_mgpu_ext._src.check_cases import STAGES
from jax_mgpu_ext._src.check_cases import StageFailed
from jax_mgpu_ext._src.check_cases import StageResult
from jax_mgpu_ext._src.check_cases import StageSkipped
from jax_mgpu_ext._src.check_cases import UsageError


class _Worker:

  def __init__(self, request_fd: int, event_fd: int):
    self._request_fd = request_fd
    self._event_fd = event_fd
    self._send_lock = threading.Lock()
    self._requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    self._pid = os.getpid()
    self._cases: dict[tuple[str, str], KernelCase] = {}

  def serve(self) -> None:
    # A thread reads, so that a parent that died is noticed, and a diagnosis
    # can be given, even while a case hangs.
    threading.Thread(target=self._read, daemon=True).start()
    while True:
      request = self._requests.get()
      if request["do"] == "load":
        self._load(check_sources.Source(**request["source"]))
      else:
        case = self._cases[request["module"], request["case"]]
        self._run(case, request["stages"])

  def _read(self) -> None:
    with os.fdopen(self._request_fd) as requests:
      for line in requests:
        request = json.loads(line)
        if request["do"] == "diagnose":
          self._send("diagnosis", lines=_diagnose())
        else:
          self._requests.put(request)
    # The parent has gone, so everything that the cases started goes, too.
    if os.getpgrp() == self._pid:
      os.killpg(self._pid, signal.SIGKILL)
    os._exit(1)

  def _send(self, event: str, **fields: Any) -> None:
    if os.getpid() != self._pid:
      # A case forked, and the copy came all the way back here.
      os._exit(0)
    data = (json.dumps({"event": event, **fields}) + "\n").encode()
    with self._send_lock:
      while data:
        data = data[os.write(self._event_fd, data) :]

  def _load(self, source: check_sources.Source) -> None:
    try:
      cases = check_sources.load(source)
    except UsageError as error:
      self._send("unusable", message=str(error))
      return
    if cases:
      # Here, since it is slow, and the time limit of a case is for the case.
      import jax_mgpu_ext._src.check_stages  # pylint: disable=unused-import,g-import-not-at-top
    self._cases = {(module, case.name): case for module, case in cases}
    _flush()
    self._send(
        "loaded",
        cases=[
            {
                "module": module,
                "name": case.name,
                "base_name": case.base_name,
                "targets": case.targets,
                "timeout_s": case.timeout_s,
            }
            for module, case in cases
        ],
    )

  def _run(self, case: KernelCase, stages: list[str]) -> None:
    clean = True
    for stage in stages:
      self._send("start", stage=stage)
      result, stage_clean = run_stage(stage, case)
      clean &= stage_clean
      _flush()
      self._send("stage", result=dataclasses.asdict(result))
      if result.state == "failed":
        break
    self._send("done", clean=clean)


def run_stage(stage: str, case: KernelCase) -> tuple[StageResult, bool]:
  """Sends a case through one stage.

  Args:
    stage: Name of the stage.
    case: The case.

  Returns:
    What came of it, and whether the process is fit for another case.
  """
  import jax  # pylint: disable=g-import-not-at-top

  module, _, function = STAGES[stage].partition(":")
  carry_out = getattr(importlib.import_module(module), function)
  # JAX 0.11 takes the trace of one kernel for another of the same function.
  jax.clear_caches()
  started = time.perf_counter()
  state, message, details, clean = "passed", "", "", True
  try:
    carry_out(case)
  except StageSkipped as skipped:
    state, message = "skipped", check_cases.text_of(skipped)
    clean = skipped.clean
  except StageFailed as failed:
    state = "failed"
    message = check_cases.text_of(failed.message)
    details = check_cases.text_of(failed.details)
  except BaseException as error:  # pylint: disable=broad-exception-caught
    # SystemExit, too: a case must not end the worker.
    state, details = "failed", _traceback(error)
    first, _, rest = check_cases.text_of(error).strip().partition("\n")
    message = f"{type(error).__name__}: {first}" if first else (
        type(error).__name__
    )
    if rest:
      details += f"\n{check_cases.shorten(rest)}"
  result = StageResult(
      stage=stage,
      state=state,
      seconds=time.perf_counter() - started,
      # Megabytes of text help nobody, whether on a terminal or as JSON.
      message=check_cases.shorten(message),
      details=check_cases.shorten(details, check_cases.DETAILS_CHARS),
  )
  return result, clean and state != "failed"


def _traceback(error: BaseException) -> str:
  """Returns the frames of an exception, without those of JAX and of ours."""
  import jax  # pylint: disable=g-import-not-at-top

  ours, jaxs = (
      os.path.dirname(path) + os.sep for path in (__file__, jax.__file__)
  )
  frames = [
      frame
      for frame in traceback.extract_tb(error.__traceback__)
      if not frame.filename.startswith(ours)
  ]
  shown = [frame for frame in frames if not frame.filename.startswith(jaxs)]
  return "".join(traceback.format_list(shown or frames[-2:])).rstrip()


def _diagnose() -> list[str]:
  module = sys.modules.get("jax_mgpu_ext._src.check_interpreter")
  try:
    return module.waiting_threads() if module is not None else []
  except Exception:  # pylint: disable=broad-exception-caught
    return []  # The thread that asks must live on.


def _flush() -> None:
  for stream in (sys.stdout, sys.stderr):
    try:
      stream.flush()
    except (AttributeError, OSError, ValueError):  # A case closed it.
      pass


def main(request_fd: int, event_fd: int) -> None:
  """Serves requests until the parent closes its end, or kills the process."""
  for fd in (request_fd, event_fd):
    os.set_inheritable(fd, False)
  faulthandler.enable(all_threads=False)
  check_cases.in_worker = True
  _Worker(request_fd, event_fd).serve()
