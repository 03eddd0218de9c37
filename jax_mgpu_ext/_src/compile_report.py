"""What `mgpu-ext compile` and `mgpu-ext sweep` print and write."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
import contextlib
import csv
import io
import os
import pathlib
import re
from typing import Any, TYPE_CHECKING

from jax_mgpu_ext._src.aot import assembly
from jax_mgpu_ext._src.check_cases import CaseResult
from jax_mgpu_ext._src.errors import UsageError
from jax_mgpu_ext._src.streams import printable

if TYPE_CHECKING:
  import rich.console

  from jax_mgpu_ext._src.aot.sweep import SweepRow

_STATE_STYLES = {
    "fits": "green", "spills": "yellow", "over": "red", "refused": "bold red",
}
_TABLE_KINDS = (".csv", ".parquet")


def print_compiled(
    results: Sequence[CaseResult], *, console: rich.console.Console
) -> None:
  """Prints a table for each target, then what went wrong.

  Args:
    results: What `check.run` returned for the stage `compile`.
    console: Where to print.
  """
  from rich import text

  for target, cases in _by_target(results).items():
    console.print(text.Text(printable(target), "bold"))
    console.print(_table(
        ("case", "registers", "spills", "stack", "SMEM", "TMEM", "blocks/SM",
         "cluster", "time"),
        [
            (
                name,
                str(data["registers"]),
                f"{data['spill_bytes']} B",
                f"{data['stack_bytes']} B",
                f"{data['smem_bytes']} B",
                str(data["tmem_columns"] or "-"),
                str(data["blocks_per_sm"]),
                str(data["cluster_size"]),
                "cached" if data["cached"] else f"{data['compile_s']:.1f} s",
            )
            for name, data in cases.items()
        ],
    ))
    for classes, names in _grouped(cases, lambda d: [_classes(d["opcode_classes"])]):
      _print_indented(f"{', '.join(names)}: {classes}", console)
    for warning, names in _grouped(cases, lambda d: map(_remark, d["warnings"])):
      _print_indented(f"{', '.join(names)}: {warning}", console, "yellow")
    console.print()
  for result in results:
    for stage in result.stages:
      if stage.state == "skipped":
        console.print(text.Text(
            f"{printable(result.selector)} skipped: {printable(stage.message)}",
            "yellow",
        ))
      elif stage.state == "failed":
        console.print(text.Text(
            f"{printable(result.selector)} failed:", "bold red"
        ))
        for line in f"{stage.message}\n{stage.details}".strip().split("\n"):
          console.print(text.Text(f"  {printable(line)}".rstrip()))
  files = [f for r in results for f in _files(r)]
  if files:
    folder = os.path.dirname(files[0])
    console.print(text.Text(
        f"wrote {len(files)} file{'s' * (len(files) > 1)} to {printable(folder)}"
    ))


def _grouped(
    cases: dict[str, dict[str, Any]],
    texts_of: Callable[[dict[str, Any]], Iterable[str]],
) -> Iterator[tuple[str, list[str]]]:
  """Yields each text once, with the names of the cases that it is said of."""
  found: dict[str, list[str]] = {}
  for name, data in cases.items():
    for line in dict.fromkeys(texts_of(data)):
      found.setdefault(line, []).append(name)
  yield from found.items()


def _remark(line: str) -> str:
  """Returns what ptxas says, without where it stands in the PTX."""
  return re.sub(
      r" in around line \d+| in function '[^']*'| at line \d+", "", line
  )


def _print_indented(
    line: str, console: rich.console.Console, style: str = ""
) -> None:
  from rich import padding
  from rich import text

  console.print(
      padding.Padding(text.Text(printable(line), style), (0, 0, 0, 2))
  )


def _files(result: CaseResult) -> Iterator[str]:
  for stage in result.stages:
    for data in stage.data.values():
      yield from data.get("files", ())


def _by_target(
    results: Sequence[CaseResult],
) -> dict[str, dict[str, dict[str, Any]]]:
  """Returns target -> case -> numbers, of what could be compiled."""
  names = [result.name for result in results]
  ambiguous = len(set(names)) < len(names)
  found: dict[str, dict[str, dict[str, Any]]] = {}
  for result in results:
    for stage in result.stages:
      for target, data in stage.data.items():
        if "error" not in data:
          name = result.selector if ambiguous else result.name
          found.setdefault(target, {})[name] = data
  return found


def compiled_json(results: Sequence[CaseResult]) -> dict[str, Any]:
  """Returns the results of `mgpu-ext compile` as plain data."""
  return {
      "ok": all(result.ok for result in results),
      "cases": [
          {
              "name": result.name,
              "selector": result.selector,
              "ok": result.ok,
              "state": stage.state,
              "message": stage.message,
              "targets": stage.data,
          }
          for result in results
          for stage in result.stages
      ],
  }


def print_sweep(
    rows: Sequence[SweepRow], *, console: rich.console.Console
) -> None:
  """Prints what came of each configuration, then how many fit.

  Args:
    rows: What `sweep` returned.
    console: Where to print.
  """
  from rich import text

  console.print(_table(
      ("config", "target", "state", "registers", "spills", "SMEM", "TMEM",
       "blocks/SM", "reason"),
      [
          (
              row.config,
              row.target,
              text.Text(row.state, _STATE_STYLES[row.state]),
              _number(row.registers),
              _number(row.spill_bytes, " B"),
              _number(row.smem_bytes, " B"),
              _number(row.tmem_columns or None),
              _number(row.blocks_per_sm),
              row.message,
          )
          for row in rows
      ],
  ))
  counts = {
      state: sum(row.state == state for row in rows) for state in _STATE_STYLES
  }
  console.print()
  console.print(text.Text(
      f"{len(rows)} configuration{'s' * (len(rows) > 1)}: "
      + ", ".join(f"{counts[s]} {s}" for s in counts if counts[s])
  ))


def _number(value: int | None, unit: str = "") -> str:
  return "" if value is None else f"{value}{unit}"


def _classes(counts: dict[str, int]) -> str:
  return ", ".join(f"{name} {count}" for name, count in counts.items() if count)


def _table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> Any:
  from rich import table
  from rich import text

  grid = table.Table(box=None, pad_edge=False)
  for column in header:
    grid.add_column(column, overflow="fold")
  for row in rows:
    grid.add_row(*(
        text.Text(printable(cell)) if isinstance(cell, str) else cell
        for cell in row
    ))
  return grid


def check_table_path(path: str) -> None:
  """Checks, before anything is compiled, that a table can be written there.

  Raises:
    UsageError: It cannot.
  """
  kind = pathlib.Path(path).suffix
  if kind not in _TABLE_KINDS:
    raise UsageError(
        f"expected --out to end in {' or '.join(_TABLE_KINDS)}, got {path!r}"
    )
  if kind == ".parquet":
    try:
      import pyarrow.parquet  # pylint: disable=unused-import,g-import-not-at-top
    except ImportError as e:
      raise UsageError(
          "Parquet needs pyarrow, which is not installed: pip install pyarrow,"
          " or write a .csv"
      ) from e
  if os.path.exists(path) and not os.path.isfile(path):
    raise UsageError(f"cannot write {path!r}: it is there, and is no file")
  folder = os.path.dirname(os.path.abspath(path))
  if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
    raise UsageError(f"cannot write {path!r}: no such folder, or not ours")


def write_table(rows: Sequence[SweepRow], path: pathlib.Path) -> None:
  """Writes a table, whole or not at all.

  Args:
    rows: What `sweep` returned.
    path: A file that `check_table_path` has accepted.
  """
  records = []
  for row in rows:
    record = row.to_json()
    counts = record.pop("opcode_classes")
    for name in assembly.OPCODE_CLASSES:  # All: tables may be put together.
      record[f"num_{name}"] = counts.get(name, 0) if counts else None
    records.append(record)
  if path.suffix == ".csv":
    text = io.StringIO()
    writer = csv.DictWriter(text, list(records[0]))
    writer.writeheader()
    writer.writerows(records)
    data = text.getvalue().encode(errors="backslashreplace")
  else:
    import pyarrow  # pylint: disable=g-import-not-at-top
    import pyarrow.parquet  # pylint: disable=g-import-not-at-top

    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), buffer)
    data = buffer.getvalue()
  path = path.resolve()  # Of a link, what it points to.
  part = path.with_name(f".{path.name}.{os.getpid()}.part")
  try:
    part.write_bytes(data)
    part.replace(path)
  except BaseException:
    with contextlib.suppress(OSError):
      part.unlink()
    raise
