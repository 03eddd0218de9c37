"""What the stage `interpret` says of a kernel that is wrong, and writes of it."""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

from jax_mgpu_ext._src.check_cases import KernelCase
from jax_mgpu_ext._src.check_cases import StageFailed
from jax_mgpu_ext._src.check_options import file_stem
from jax_mgpu_ext._src.check_options import Options

# Threads that a failed line shows; the file has all.
_SHOWN_THREADS = 8
# What the codes of reports that are no hangs are called.
_KINDS = {"DL004": "barrier misuse", "DL007": "barrier misuse"}


def raise_hang(
    case: KernelCase, options: Options, report: Any, also: str = ""
) -> None:
  """Fails the stage with a report of `deadlock`, a few lines of it.

  Args:
    case: The case.
    options: Its `out` is the folder for the whole report, as text and as JSON.
    report: A `deadlock.Report`.
    also: What else is wrong with it, one line.

  Raises:
    StageFailed: Always.
  """
  kind = _KINDS.get(report.code, "hang")
  lines = [f"also a {also}"] if also else []
  for thread in report.threads[:_SHOWN_THREADS]:
    line = f"{thread['thread']}: {thread['state']}"
    if thread["barrier"]:
      line += f", waits for {thread['barrier']}"
    if thread["line"]:
      line += f" at {thread['line']}"
    lines.append(line)
  if len(report.threads) > _SHOWN_THREADS:
    lines.append(f"and {len(report.threads) - _SHOWN_THREADS} more threads")
  lines += _write(case, options, "hang", str(report), report.to_json())
  raise StageFailed(
      f"{kind}: {report.summary}",
      "\n".join(lines),
      data=dict(failure=kind, report=json.loads(report.to_json())),
  )


def raise_race(case: KernelCase, options: Options, summary: str, text: str):
  """Fails the stage with a race.

  Raises:
    StageFailed: Always.
  """
  lines = [text, *_write(case, options, "race", text, None)]
  raise StageFailed(summary, "\n".join(lines), data=dict(failure="race"))


def _write(
    case: KernelCase, options: Options, what: str, text: str, document: str | None
) -> list[str]:
  """Writes a report to files, and returns a line that says so."""
  if not options.out:
    return []
  folder = pathlib.Path(options.out)
  folder.mkdir(parents=True, exist_ok=True)
  path = folder / f"{file_stem(case.name)}.{what}.txt"
  path.write_text(text + "\n", encoding="utf-8")
  if document is not None:
    path.with_suffix(".json").write_text(document + "\n", encoding="utf-8")
  return [f"the whole report is in {os.path.relpath(path)}"]
