"""The child process that imports a source and checks its cases.

It reads requests and writes events as lines of JSON, on two pipes of their own:
standard output and error belong to the code of the cases. A worker serves one
source for all its life, so that no module of one source meets those of another.

Requests, from the parent:
  {"do": "load", "source": {...}}                      once, first
  {"do": "run", "module": ..., "case": ..., "stages": [...], "options": {...}}
  {"do": "diagnose"}                                   while a case runs
  {"do": "end"}                                        last
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
import os
import sys
import time
import traceback
from typing import Any

from jax_mgpu_ext._src import check_cases
from jax_mgpu_ext._src import check_options
from jax_mgpu_ext._src import check_sources
from jax_mgpu_ext._src import child_server
from jax_mgpu_ext._src import texts
from jax_mgpu_ext._src.check_cases import KernelCase
from jax_mgpu_ext._src.check_cases import STAGES
from jax_mgpu_ext._src.check_cases import StageFailed
from jax_mgpu_ext._src.check_cases import StageResult
from jax_mgpu_ext._src.check_cases import StageSkipped
from jax_mgpu_ext._src.check_cases import UsageError
from jax_mgpu_ext._src.check_options import Options


class _Worker(child_server.Server):

  def __init__(self, request_fd: int, event_fd: int):
    super().__init__(request_fd, event_fd)
    self._cases: dict[tuple[str, str], KernelCase] = {}

  def carry_out(self, request: dict[str, Any]) -> None:
    if request["do"] == "load":
      self._load(check_sources.Source(**request["source"]))
    elif request["do"] == "end":
      # What compiles has folders to remove.
      if compilers := sys.modules.get("jax_mgpu_ext._src.aot.compilers"):
        compilers.shut_down()
      os._exit(0)
    else:
      case = self._cases[request["module"], request["case"]]
      options = check_options.from_json(request["options"])
      self._run(case, request["stages"], options)

  def diagnose(self) -> list[str]:
    module = sys.modules.get("jax_mgpu_ext._src.check_interpreter")
    return module.waiting_threads() if module is not None else []

  def _load(self, source: check_sources.Source) -> None:
    try:
      cases = check_sources.load(source)
    except UsageError as error:
      self.send("unusable", message=str(error))
      return
    if cases:
      # Here, since it is slow, and the time limit of a case is for the case.
      import jax_mgpu_ext._src.check_stages  # pylint: disable=unused-import,g-import-not-at-top
    self._cases = {(module, case.name): case for module, case in cases}
    child_server.flush()
    self.send(
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

  def _run(
      self, case: KernelCase, stages: list[str], options: Options
  ) -> None:
    clean = True
    for stage in stages:
      self.send("start", stage=stage)
      result, stage_clean = run_stage(stage, case, options)
      clean &= stage_clean
      child_server.flush()
      self.send("stage", result=dataclasses.asdict(result))
      if result.state == "failed":
        break
    self.send("done", clean=clean)

# The score of a whole message in the catalog's search.
_SURE = 0.9


def run_stage(
    stage: str, case: KernelCase, options: Options
) -> tuple[StageResult, bool]:
  """Sends a case through one stage.

  Args:
    stage: Name of the stage.
    case: The case.
    options: What is asked of the stage.

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
  data: dict[str, Any] | None = None
  try:
    data = carry_out(case, options)
  except StageSkipped as skipped:
    state, message = "skipped", texts.text_of(skipped)
    clean = skipped.clean
  except StageFailed as failed:
    state = "failed"
    message = texts.text_of(failed.message)
    details = texts.text_of(failed.details)
    data = failed.data
  except BaseException as error:  # pylint: disable=broad-exception-caught
    # SystemExit, too: a case must not end the worker.
    state, details = "failed", _traceback(error)
    first, _, rest = texts.text_of(error).strip().partition("\n")
    message = f"{type(error).__name__}: {first}" if first else (
        type(error).__name__
    )
    message += _code_of(error)
    if rest:
      details += f"\n{texts.shorten(rest)}"
  result = StageResult(
      stage=stage,
      state=state,
      seconds=time.perf_counter() - started,
      # Megabytes of text help nobody, whether on a terminal or as JSON.
      message=texts.shorten(message),
      details=texts.shorten(details, texts.DETAILS_CHARS),
      data=data or {},
  )
  return result, clean and state != "failed"


def _code_of(error: BaseException) -> str:
  """Returns the catalog's code for an error that JAX raises by itself, or ""."""
  from jax_mgpu_ext._src import catalog  # pylint: disable=g-import-not-at-top

  for entry, score in catalog.find(texts.text_of(error)[:2000])[:1]:
    if entry.kind == "jax" and score >= _SURE:
      return f" [{entry.code}]"
  return ""


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


def main(request_fd: int, event_fd: int) -> None:
  """Serves requests until the parent closes its end, or kills the process."""
  faulthandler.enable(all_threads=False)
  check_cases.in_worker = True
  _Worker(request_fd, event_fd).serve()
