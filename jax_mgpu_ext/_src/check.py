"""Sends kernel cases through the stages that this machine can carry out.

The parent only plans and shows: a case's module is imported, and its stages are
carried out, in child processes (`check_worker`), several at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import concurrent.futures
import dataclasses
import difflib
import pathlib

from jax_mgpu_ext._src import check_cases
from jax_mgpu_ext._src import check_options
from jax_mgpu_ext._src import check_pool
from jax_mgpu_ext._src import check_sources
from jax_mgpu_ext._src import errors
from jax_mgpu_ext._src import programs
from jax_mgpu_ext._src import targets as targets_lib
from jax_mgpu_ext._src.check_cases import CaseResult as CaseResult
from jax_mgpu_ext._src.check_cases import kernel_case as kernel_case
from jax_mgpu_ext._src.check_cases import KernelCase as KernelCase
from jax_mgpu_ext._src.check_cases import STAGES as STAGES
from jax_mgpu_ext._src.check_cases import StageResult as StageResult
from jax_mgpu_ext._src.check_cases import TARGETS as TARGETS
from jax_mgpu_ext._src.check_cases import UsageError as UsageError
from jax_mgpu_ext._src.check_options import Options as Options


def run(
    selectors: Sequence[str] = (),
    *,
    jobs: int | None = None,
    timeout_s: float | None = None,
    stages: Sequence[str] | None = None,
    targets: Sequence[str] | None = None,
    declared_only: bool = True,
    options: Options = Options(),
    on_progress: Callable[[int, int], None] | None = None,
) -> list[CaseResult]:
  """Checks the cases that the selectors stand for.

  Args:
    selectors: Each `file.py`, `file.py::case`, `package.module` or
      `package.module::case`; a package stands for all of its modules. None at
      all: the shipped reference kernels.
    jobs: How many cases to check at a time; default: one for each core.
    timeout_s: Time limit for a case, in seconds; default: the case's own.
    stages: Names of the stages to carry out; default: all.
    targets: Only check cases for one of these targets, and only for these;
      default: all that a case is for.
    declared_only: Whether a case is left out for targets that it is not for.
    options: What else is asked of the stages; its targets are not used.
    on_progress: Called in this thread with the number of cases done, and of
      all, when the latter is known and after each case.

  Returns:
    One result for each case, in the order of selectors and declarations.

  Raises:
    UsageError: If there is nothing to check, or not what was asked for.
    KeyboardInterrupt: On Ctrl-C, after all child processes were ended.
  """
  if check_cases.in_worker:
    # Else a file that checks itself would do so without end.
    raise UsageError(
        "a module that is being checked must not call check.run when it is"
        " imported: put the call below `if __name__ == '__main__':`"
    )
  wanted_stages = _choose("stage", stages, tuple(STAGES))
  if isinstance(targets, str):
    targets = [targets]
  try:
    targets_lib.distinct(targets or ())
  except errors.TargetError as e:
    raise UsageError(str(e)) from e
  if jobs is None:
    jobs = programs.num_cores()
  num_jobs = check_cases.count(jobs)
  if num_jobs is None or num_jobs < 1:
    raise UsageError(f"expected at least 1 job, got {jobs!r}")
  if timeout_s is not None:
    try:
      timeout_s = check_cases.number("timeout_s", timeout_s, positive=True)
    except ValueError as e:
      got = str(e).rpartition("timeout_s=")[2]
      raise UsageError(f"expected a time limit above 0 s, got {got}") from e
  _check_writable(options)
  asked: dict[check_sources.Source, list[str | None]] = {}
  if isinstance(selectors, str):
    selectors = [selectors]
  for selector in selectors or [check_sources.SHIPPED]:
    source, case = check_sources.parse(selector)
    asked.setdefault(source, []).append(case)
  report = on_progress or (lambda done, total: None)
  with check_pool.Pool(num_jobs) as pool:
    tasks = []
    for source, loaded in zip(asked, pool.map(pool.load, asked)):
      tasks.extend(_select(source, loaded, asked[source]))
    if not tasks:
      raise UsageError(
          f"there are no cases in {', '.join(repr(s.shown) for s in asked)}:"
          " declare one with jax_mgpu_ext.check.kernel_case"
      )
    if options.emit or options.out or options.trace:
      _check_file_names(tasks)
    report(0, len(tasks))

    def check(task: check_pool.Task) -> CaseResult:
      chosen = tuple(targets or task.targets)
      if declared_only:
        chosen = tuple(t for t in chosen if t in task.targets)
      if not chosen:
        reason = f"the case is for {', '.join(task.targets)}"
        return check_pool.result(
            task, [check_pool.skipped(s, reason) for s in wanted_stages]
        )
      limit_s = task.timeout_s if timeout_s is None else timeout_s
      return pool.check(
          task, wanted_stages, limit_s,
          dataclasses.replace(
              options, targets=chosen,
              trace=_trace_file(options.trace, task, len(tasks)),
          ),
      )

    futures = [pool.executor.submit(check, task) for task in tasks]
    for done, future in enumerate(concurrent.futures.as_completed(futures), 1):
      future.result()
      report(done, len(tasks))
    return [future.result() for future in futures]


def _check_writable(options: Options) -> None:
  """Checks, before anything runs, that what is asked for can be written."""
  if options.trace:
    path = pathlib.Path(options.trace)
    if path.suffix.lower() not in (".json", ".png"):
      raise UsageError(
          "expected a file that ends in .json or .png for the timeline, got"
          f" {options.trace!r}"
      )
    if path.is_dir() or not path.parent.is_dir():
      raise UsageError(
          "expected a file in a folder that is there for the timeline, got"
          f" {options.trace!r}"
      )
  if options.out and pathlib.Path(options.out).is_file():
    raise UsageError(f"expected a folder for reports, got the file {options.out!r}")


def _trace_file(name: str, task: check_pool.Task, num_tasks: int) -> str:
  """Returns the file for the timeline of one case: its own, if there are more."""
  if not name or num_tasks == 1:
    return name
  path = pathlib.PurePath(name)
  stem = f"{path.stem}-{check_options.file_stem(task.name)}"
  return str(path.with_name(stem + path.suffix))


def _check_file_names(tasks: Sequence[check_pool.Task]) -> None:
  """Checks that no case would overwrite the files of another one."""
  seen: dict[str, check_pool.Task] = {}
  for task in tasks:
    other = seen.setdefault(check_options.file_stem(task.name).lower(), task)
    if other is not task:
      raise UsageError(
          f"{other.selector!r} and {task.selector!r} would be written to the same"
          " files: compile one at a time"
      )


def _choose(
    what: str, wanted: Sequence[str] | None, legal: Sequence[str]
) -> list[str]:
  """Returns the legal values that are wanted, in their own order."""
  unknown = [value for value in wanted or () if value not in legal]
  if unknown:
    raise UsageError(
        f"unknown {what} {unknown[0]!r}, expected one of {', '.join(legal)}"
    )
  return [value for value in legal if not wanted or value in wanted]


def _select(
    source: check_sources.Source,
    loaded: list[check_pool.Task],
    names: list[str | None],
) -> list[check_pool.Task]:
  """Returns the cases of a source that the selectors name."""
  for name in names:
    if name is not None and not any(
        name in (task.name, task.base_name) for task in loaded
    ):
      known = list(dict.fromkeys(task.name for task in loaded))
      # The likeliest first; all of them might be very many.
      known = difflib.get_close_matches(name, known, n=5, cutoff=0) or known
      raise UsageError(
          f"there is no case {name!r} in {source.shown!r}"
          + (f", but {', '.join(map(repr, known))}" if known else "")
      )
  return [
      task
      for task in loaded
      if None in names or task.name in names or task.base_name in names
  ]
