"""Checks several cases at a time, each in a child process.

A pool has as many threads as cases are checked at a time; each of them talks to
one worker (`check_worker`).
"""

from __future__ import annotations

from collections.abc import Sequence
import concurrent.futures
import dataclasses
import threading
import time

from jax_mgpu_ext._src import check_sources
from jax_mgpu_ext._src import children
from jax_mgpu_ext._src.check_cases import CaseResult
from jax_mgpu_ext._src.check_cases import StageResult
from jax_mgpu_ext._src.check_cases import UsageError
from jax_mgpu_ext._src.check_options import Options

# For ending by itself, when all is done; in seconds.
_END_S = 2.0
# For importing a source, which is no part of any case's time; in seconds.
_LOAD_TIMEOUT_S = 60.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
  """One case to check, as far as the parent knows it."""

  source: check_sources.Source
  module: str
  name: str
  base_name: str
  targets: tuple[str, ...]
  timeout_s: float

  @property
  def selector(self) -> str:
    is_file = self.source.kind == "file"
    return f"{self.source.shown if is_file else self.module}::{self.name}"


def skipped(stage: str, reason: str) -> StageResult:
  return StageResult(stage=stage, state="skipped", message=reason)


def result(task: Task, stages: Sequence[StageResult]) -> CaseResult:
  return CaseResult(
      name=task.name,
      selector=task.selector,
      targets=task.targets,
      stages=tuple(stages),
  )


class PoolClosed(Exception):
  """A worker was asked for after the pool was closed."""


class Worker(children.Child):
  """A child process that checks cases, bound to a source.

  Attributes:
    source: What it imports.
    loaded: Whether it has done so.
  """

  def __init__(self, source: check_sources.Source):
    super().__init__(
        "jax_mgpu_ext._src.check_worker",
        env={
            "JAX_PLATFORMS": "cpu",
            # Hidden frames would hide who raised a NotImplementedError.
            "JAX_TRACEBACK_FILTERING": "off",
            # Each thread of a kernel that waits holds one of XLA's threads for
            # callbacks. By default there are as many as cores, and on a small
            # machine a cluster waits for ever for the block that has none.
            "NPROC": "32",
        },
    )
    self.source = source
    self.loaded = False


class Pool:
  """Threads that each talk to one worker at a time.

  At most `jobs` workers live at once. One that has done its work well is kept
  for the next case of its source; all others are killed.
  """

  def __init__(self, jobs: int):
    self._jobs = jobs
    self.executor = concurrent.futures.ThreadPoolExecutor(jobs)
    self._lock = threading.Lock()
    self._idle: list[Worker] = []
    self._busy: list[Worker] = []
    self._closed = False

  def __enter__(self) -> Pool:
    return self

  def __exit__(self, exception_type, *unused) -> None:
    with self._lock:
      self._closed = True
      workers = self._idle + self._busy
      idle = list(self._idle)
    if exception_type is None:
      for worker in idle:
        worker.request("end")
      for worker in idle:
        worker.wait_for_end(_END_S)
    for worker in workers:
      worker.hang_up()  # All of them, before waiting for the first.
    for worker in workers:
      worker.kill()  # The threads that wait for them then stop by themselves.
    self.executor.shutdown(cancel_futures=True)
    for worker in workers:
      worker.close()

  def map(self, function, items) -> list:
    return list(self.executor.map(function, items))

  def _take(self, source: check_sources.Source) -> Worker:
    with self._lock:
      if self._closed:
        raise PoolClosed()
      # Somebody else may have killed one meanwhile.
      stale = [worker for worker in self._idle if worker.has_ended()]
      for worker in stale:
        self._idle.remove(worker)
      worker = next((w for w in self._idle if w.source == source), None)
      if worker is not None:
        self._idle.remove(worker)
      else:
        if self._idle and len(self._idle) + len(self._busy) >= self._jobs:
          stale.append(self._idle.pop(0))
        # Under the lock, so that closing the pool misses no worker.
        worker = Worker(source)
      self._busy.append(worker)
    for other in stale:
      other.close()
    return worker

  def _give_back(self, worker: Worker, healthy: bool) -> None:
    with self._lock:
      if self._closed:
        return  # Whoever closes the pool sees to it.
      self._busy.remove(worker)
      if healthy:
        self._idle.append(worker)
    if not healthy:
      worker.close()

  def load(self, source: check_sources.Source) -> list[Task]:
    """Returns all cases of a source."""
    worker = self._take(source)
    healthy = False
    try:
      tasks = self._load(worker)
      healthy = True
      return tasks
    finally:
      self._give_back(worker, healthy)

  def _load(self, worker: Worker) -> list[Task]:
    source = worker.source
    worker.request("load", source=dataclasses.asdict(source))
    try:
      event = worker.event(time.monotonic() + _LOAD_TIMEOUT_S)
    except children.ChildDied as died:
      last = worker.take_output().rpartition("\n")[2]
      raise UsageError(
          f"cannot import {source.shown!r}: {died}" + (last and f" ({last})")
      ) from died
    except children.ChildTimeout as timeout:
      raise UsageError(
          f"cannot import {source.shown!r}: it takes more than"
          f" {_LOAD_TIMEOUT_S:g} s"
      ) from timeout
    if event["event"] == "unusable":
      raise UsageError(event["message"])
    worker.loaded = True
    return [
        Task(
            source=source, **{**case, "targets": tuple(case["targets"])}
        )
        for case in event["cases"]
    ]

  def check(
      self,
      task: Task,
      stages: Sequence[str],
      limit_s: float,
      options: Options = Options(),
  ) -> CaseResult:
    """Sends one case through the stages, in a worker."""
    worker = self._take(task.source)
    results: list[StageResult] = []
    healthy = False
    try:
      if not worker.loaded:
        self._load(worker)
      worker.take_output()
      healthy = self._run(worker, task, stages, limit_s, options, results)
    except UsageError as error:  # It could be imported before, but not again.
      results.append(
          StageResult(stage=stages[0], state="failed", message=str(error))
      )
    finally:
      self._give_back(worker, healthy)
    for stage in stages[len(results) :]:
      results.append(skipped(stage, f"{results[-1].stage} did not pass"))
    return result(task, results)

  def _run(
      self,
      worker: Worker,
      task: Task,
      stages: Sequence[str],
      limit_s: float,
      options: Options,
      results: list[StageResult],
  ) -> bool:
    """Fills `results`, and returns whether the worker may be used again."""
    started = stage_started = time.monotonic()
    worker.request(
        "run",
        module=task.module,
        case=task.name,
        stages=list(stages),
        options=options.to_json(),
    )
    stage = stages[0]
    try:
      while True:
        event = worker.event(started + limit_s)
        if event["event"] == "start":
          stage, stage_started = event["stage"], time.monotonic()
        elif event["event"] == "stage":
          result = StageResult(**event["result"])
          if result.state == "failed":
            result = _with_output(result, worker.take_output())
          results.append(result)
        elif event["event"] == "done":
          return event["clean"]
    except children.ChildTimeout as timeout:
      message = f"not done within the time limit of {limit_s:g} s"
      if stage == "interpret":
        message += " [DL009]"
      details = "\n".join(timeout.lines)
    except children.ChildDied as died:
      message, details = str(died), ""
    failed = StageResult(
        stage=stage,
        state="failed",
        seconds=time.monotonic() - stage_started,
        message=message,
        details=details,
    )
    results.append(_with_output(failed, worker.take_output()))
    return False


def _with_output(result: StageResult, output: str) -> StageResult:
  """Adds what a failed case printed to its details."""
  if not output:
    return result
  parts = [result.details, f"it printed:\n{output}"]
  return dataclasses.replace(result, details="\n".join(filter(None, parts)))
