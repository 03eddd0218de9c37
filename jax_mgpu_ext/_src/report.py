"""Every table, text and JSON that a person, or a person's script, reads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TYPE_CHECKING

from jax_mgpu_ext._src import texts
from jax_mgpu_ext._src.check_cases import CaseResult
from jax_mgpu_ext._src.streams import printable

if TYPE_CHECKING:
  import rich.console
  import rich.table
  import rich.text

  from jax_mgpu_ext._src.catalog import Entry
  from jax_mgpu_ext._src.doctor import Facts
  from jax_mgpu_ext._src.hooks import HookStatus

_STATE_STYLES = {"passed": "green", "failed": "bold red", "skipped": "yellow"}


def print_check(
    results: Sequence[CaseResult], *, console: rich.console.Console
) -> None:
  """Prints one line a case, then why stages were skipped, then the failures.

  Args:
    results: What `check.run` returned.
    console: Where to print.
  """
  from rich import table
  from rich import text

  stages = list(dict.fromkeys(s.stage for r in results for s in r.stages))
  names = [result.name for result in results]
  ambiguous = len(set(names)) < len(names)
  grid = table.Table(box=None, pad_edge=False)
  for column in ("case", *stages):
    grid.add_column(column, overflow="fold")
  for result in results:
    name = result.selector if ambiguous else result.name
    grid.add_row(
        text.Text(printable(name), style="" if result.ok else "red"),
        *(
            text.Text(
                f"{stage.state} {stage.seconds:.1f} s"
                if stage.seconds
                else stage.state,
                style=_STATE_STYLES[stage.state],
            )
            for stage in result.stages
        ),
    )
  console.print(grid)
  for line in _skips(results):
    console.print(text.Text(line, style="yellow"))
  for result in results:
    for stage in result.stages:
      if stage.state == "failed":
        console.print()
        console.print(
            text.Text(
                f"{printable(result.selector)} failed {stage.stage}:",
                style="bold red",
            )
        )
        lines = "\n".join(
            filter(
                None,
                (
                    printable(stage.message),
                    printable(stage.details, texts.DETAILS_CHARS),
                ),
            )
        )
        for line in lines.split("\n"):
          console.print(text.Text(f"  {line}".rstrip()))
  counts = _case_counts(results)
  console.print()
  console.print(
      text.Text(
          f"{_count(len(results), 'case')}: {counts['passed']} passed,"
          f" {counts['failed']} failed"
          + (f", {counts['skipped']} skipped" if counts["skipped"] else "")
          + "".join(
              f"; {stage} skipped for {len(names)}"
              for stage, names in _skipped_stages(results).items()
          ),
          style=_STATE_STYLES["failed" if counts["failed"] else "passed"],
      )
  )


def _skipped_stages(results: Sequence[CaseResult]) -> dict[str, list[str]]:
  """Returns which cases passed without a stage that was skipped."""
  skipped: dict[str, list[str]] = {}
  for result in results:
    if any(stage.state == "passed" for stage in result.stages):
      for stage in result.stages:
        if stage.state == "skipped" and result.ok:
          skipped.setdefault(stage.stage, []).append(result.name)
  return skipped


def _skips(results: Sequence[CaseResult]) -> Iterable[str]:
  """Yields a line for each reason why a stage was skipped."""
  skipped: dict[tuple[str, str], list[str]] = {}
  for result in results:
    reasons = {
        stage.message for stage in result.stages if stage.state == "skipped"
    }
    nothing = all(stage.state == "skipped" for stage in result.stages)
    if nothing and len(reasons) == 1 and len(result.stages) > 1:
      reason = "everything", printable(reasons.pop())
      skipped.setdefault(reason, []).append(result.name)
      continue
    for stage in result.stages:
      if stage.state == "skipped" and result.ok:
        reason = stage.stage, printable(stage.message)
        skipped.setdefault(reason, []).append(result.name)
  for (stage, reason), names in skipped.items():
    yield f"{stage} skipped for {_count(len(names), 'case')}: {reason}"


def check_json(results: Sequence[CaseResult]) -> dict[str, Any]:
  """Returns what `print_check` prints, as data.

  Args:
    results: What `check.run` returned.

  Returns:
    `ok`, the number of cases in each state, and each case's own data. A case
    counts as skipped if no stage could be carried out.
  """
  return {
      "ok": all(result.ok for result in results),
      **_case_counts(results),
      "cases": [result.to_json() for result in results],
  }


def _case_counts(results: Sequence[CaseResult]) -> dict[str, int]:
  """Returns how many cases passed, failed, and were skipped."""
  counts = dict(passed=0, failed=0, skipped=0)
  for result in results:
    if not result.ok:
      counts["failed"] += 1
    elif any(stage.state == "passed" for stage in result.stages):
      counts["passed"] += 1
    else:
      counts["skipped"] += 1
  return counts


def _count(number: int, noun: str) -> str:
  return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


# The error catalog, for `mgpu-ext explain`.


def print_entries(
    entries: Iterable[Entry], *, console: rich.console.Console
) -> None:
  """Prints one line per catalog entry: code, exception and title.

  Args:
    entries: What to list.
    console: Where to print.
  """
  console.print(_columns((e.code, e.exception, e.title) for e in entries))


def print_entry(
    entry: Entry,
    *,
    others: Sequence[Entry] = (),
    console: rich.console.Console,
) -> None:
  """Prints a catalog entry in full.

  Args:
    entry: What to print.
    others: Further entries that may have been meant.
    console: Where to print.
  """
  raiser = "JAX" if entry.kind == "jax" else "jax_mgpu_ext"
  if entry.hook:
    raiser += f" (hook {entry.hook})"
  _print_heading(f"{entry.code}: {entry.title}", console)
  console.print(f"{entry.exception}, raised by {raiser}", markup=False)
  _print_section("Meaning", [entry.meaning], console)
  _print_section("When", [entry.when], console)
  _print_section("Common situations", entry.situations, console, "-")
  _print_section("How to mend it", entry.fixes, console, "-")
  _print_section("Before", entry.before.split("\n"), console)
  _print_section("After", entry.after.split("\n"), console)
  facts = [f"{fact.text} ({fact.source})" for fact in entry.facts]
  _print_section("Facts", facts, console, "-")
  if entry.related:
    _print_section("See also", [", ".join(entry.related)], console)
  if others:
    console.print()
    _print_heading("Or was it one of these?", console)
    print_entries(others, console=console)


# The installation, for `mgpu-ext hooks` and `mgpu-ext doctor`.

_HOOK_STYLES = {
    "applied": "green",
    "in tree": "green",
    "not needed": "green",
    "refused": "bold red",
    "failed": "bold red",
}


def print_hooks(
    states: Iterable[HookStatus],
    error: str = "",
    *,
    console: rich.console.Console,
) -> None:
  """Prints one line per hook: slug, state, and why.

  Args:
    states: What to print.
    error: Why the states are not final, empty if they are.
    console: Where to print.
  """
  from rich import text

  console.print(_columns(map(_hook_row, states)))
  if error:
    console.print(text.Text(printable(error), "bold red"))


def _hook_row(status: HookStatus) -> tuple[str, rich.text.Text, str]:
  from rich import text

  words = [status.reason]
  if status.state == "refused":
    words += [f"needs {status.required}", status.found]
  style = _HOOK_STYLES.get(status.state, "yellow")
  why = "; ".join(filter(None, words))
  return status.slug, text.Text(status.state, style), why


def print_doctor(facts: Facts, *, console: rich.console.Console) -> None:
  """Prints everything that is known about an installation, problems last.

  Args:
    facts: What `doctor.collect` found.
    console: Where to print.
  """
  from rich import text

  def absent(words: str) -> text.Text:
    return text.Text(words, "yellow")

  jax_gpus = [("JAX", device) for device in facts.gpu.devices]
  driver_gpus = [("driver", device) for device in facts.gpu.driver]
  sections = {
      "System": [
          ("Python", facts.python, facts.executable),
          ("system", facts.system),
      ],
      "Packages": [
          (p.name, p.version or absent("not installed"), p.note)
          for p in facts.packages
      ],
      "Extras": [
          (extra.name, absent("missing"), ", ".join(extra.missing))
          if extra.missing
          else (extra.name, "installed")
          for extra in facts.extras
      ],
      "Tools": [
          (tool.name, tool.version or "unknown version", tool.path)
          if tool.path
          else (tool.name, absent("not found"))
          for tool in facts.tools
      ],
      "GPU": [
          *(jax_gpus or [("JAX", absent(facts.gpu.state), facts.gpu.reason)]),
          *(driver_gpus or [("driver", absent("none"), "says nvidia-smi")]),
      ],
      "Environment": [
          (name, absent("not set") if value is None else value)
          for name, value in facts.variables.items()
      ],
      "Hooks": list(map(_hook_row, facts.hooks)),
  }
  for title, rows in sections.items():
    if rows:
      _print_heading(title, console)
      console.print(_columns(("", *row) for row in rows))
  _print_heading("Problems", console)
  style = _STATE_STYLES["failed" if facts.problems else "passed"]
  for problem in facts.problems or ("none",):
    console.print(text.Text(f"  {printable(problem)}", style))


def _print_heading(heading: str, console: rich.console.Console) -> None:
  from rich import text

  console.print(text.Text(heading, "bold"))


def _print_section(
    title: str,
    paragraphs: Iterable[str],
    console: rich.console.Console,
    bullet: str = "",
) -> None:
  """Prints a heading and indented paragraphs; nothing if there are none."""
  rows = [(bullet, paragraph) for paragraph in paragraphs]
  if rows:
    console.print()
    _print_heading(title, console)
    console.print(_columns(rows))


def _columns(
    rows: Iterable[Sequence[str | rich.text.Text]],
) -> rich.table.Table:
  """Returns rows of cells side by side; long cells are folded, not cut."""
  from rich import table
  from rich import text

  grid = table.Table.grid(padding=(0, 2, 0, 0))
  rows = list(rows)
  for _ in range(max(map(len, rows), default=0)):
    grid.add_column(overflow="fold")
  for row in rows:
    cells = [text.Text(printable(c)) if isinstance(c, str) else c for c in row]
    grid.add_row(*cells)
  return grid
