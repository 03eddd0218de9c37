"""The tables, bars and JSON of budgets and targets that a person reads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TYPE_CHECKING

from jax_mgpu_ext._src import budget_rows
from jax_mgpu_ext._src.budget import Budget
from jax_mgpu_ext._src.budget_rows import Row
from jax_mgpu_ext._src.streams import printable
from jax_mgpu_ext._src.targets import Target

if TYPE_CHECKING:
  import rich.console
  import rich.text

# Cells of the bar that stand for all the SMEM that a block may have.
_BAR = 64
# What the items are drawn with, one after the other, and the rest.
_MARKS = "abcdefghijklmnopqrstuvwxyz"
_PADDING, _FREE, _OVER = "-", ".", "!"


def print_budget(found: Budget, *, console: rich.console.Console) -> None:
  """Prints a budget: its items, the SMEM map, what does not fit.

  Args:
    found: What `budget.budget` or `budget.budget_kernel` returned.
    console: Where to print.
  """
  from rich import table
  from rich import text

  marks = _marks(found.rows)
  grid = table.Table(box=None, pad_edge=False)
  for column, justify in (
      ("", "left"), ("item", "left"), ("kind", "left"), ("type", "left"),
      ("SMEM bytes", "right"), ("padding", "right"), ("offset", "right"),
      ("TMEM columns", "right"), ("registers", "right"),
  ):
    grid.add_column(column, justify=justify, overflow="fold")
  for row in found.rows:
    grid.add_row(
        marks.get(row, ""),
        *map(text.Text, _cells(row)),
        style="" if row.in_total else "dim",
    )
  console.print(grid)
  console.print()
  style = "bold red" if found.smem_bytes > found.smem_limit_bytes else ""
  console.print(
      text.Text(
          f"SMEM  {found.smem_bytes} of {found.smem_limit_bytes} bytes a block"
          f" on {found.target.name} ({_percent(found)} %)",
          style,
      )
  )
  console.print(text.Text(f"[{bar(found)}]"))
  console.print(
      text.Text(
          f"{_PADDING} padding  {_FREE} free"
          + (f"  {_OVER} the limit" if style else "")
      )
  )
  console.print()
  if found.tmem_columns:
    console.print(
        f"TMEM  {found.tmem_columns} of {found.target.tmem_columns} columns"
        f" ({found.tmem_columns_requested} asked for)"
    )
  if found.registers_per_thread:
    console.print(
        f"accumulators  {found.registers_per_thread} of"
        f" {found.target.registers_per_thread} registers a thread"
    )
  console.print(
      f"threads  {found.threads} a block, {found.cluster_size} blocks a cluster"
      if found.cluster_size > 1
      else f"threads  {found.threads} a block"
  )
  if found.fits:
    console.print(
        f"blocks per SM  {_blocks(found)}"
    )
  for warning in found.warnings:
    console.print(text.Text(f"note: {printable(warning)}", "yellow"))
  for error in found.over:
    console.print(text.Text(f"over: {printable(str(error))}", "bold red"))
  if found.fits:
    console.print(text.Text("fits", "green"))


def _cells(row: Row) -> Iterable[str]:
  kind = row.kind if row.in_total else f"({row.kind})"
  shape = ",".join(map(str, row.shape))
  yield printable(row.path)
  yield f"{kind} {row.note}" if row.note else kind
  yield f"{row.dtype}[{shape}]" if row.dtype else ""
  yield str(row.smem_bytes) if row.offset_bytes is not None else ""
  yield str(row.padding_bytes or "")
  yield "" if row.offset_bytes is None else str(row.offset_bytes)
  yield str(row.tmem_columns or "")
  yield str(row.registers_per_thread or "")


def _marks(rows: Sequence[Row]) -> dict[Row, str]:
  """Returns a letter for each row that the map has something of."""
  mapped = [row for row in rows if row.in_total and row.smem_bytes]
  return {
      row: _MARKS[index % len(_MARKS)] for index, row in enumerate(mapped)
  }


def bar(found: Budget) -> str:
  """Draws the SMEM map, each item as wide as its share of the limit.

  A cell shows what takes most of it; an item that takes most of none takes the
  place of a neighbour that has other cells. What is over the limit goes on
  behind a mark, up to as much again.
  """
  limit = found.target.smem_bytes_per_block
  pieces = []  # (begin, end, what it is drawn with)
  for row, mark in _marks(found.rows).items():
    begin = row.offset_bytes or 0
    end = begin + row.smem_bytes
    pieces += [(begin, end, mark), (end, end + row.padding_bytes, _PADDING)]
  shown = min(max(limit, found.smem_bytes), 2 * limit)
  cells = []
  for index in range(-(-shown * _BAR // limit)):
    low, high = index * limit // _BAR, (index + 1) * limit // _BAR
    taken = {_FREE: 0}
    for begin, end, mark in pieces:
      if (size := min(high, end) - max(low, begin)) > 0:
        taken[mark] = taken.get(mark, 0) + size
    taken[_FREE] = high - low - sum(taken.values())
    cells.append(max(taken, key=taken.__getitem__))
  for begin, _, mark in pieces:
    at = begin * _BAR // limit
    if mark != _PADDING and mark not in cells and at < len(cells):
      if cells[at] in (_FREE, _PADDING) or cells.count(cells[at]) > 1:
        cells[at] = mark
  if found.smem_bytes > limit:
    cells.insert(_BAR, _OVER)
  return "".join(cells)


def _blocks(found: Budget) -> str:
  """Says how many blocks a multiprocessor holds, and whether that is known."""
  if found.limited_by == "registers":
    return f"{found.blocks_per_sm} (set by registers)"
  return (
      f"at most {found.blocks_per_sm} (set by {found.limited_by}; the compiler"
      " decides on registers)"
  )


def _percent(found: Budget) -> str:
  return f"{100 * found.smem_bytes / found.smem_limit_bytes:.1f}"


def budgets_json(budgets: Sequence[Budget]) -> dict[str, Any]:
  """Returns what `print_budget` prints of several targets, as data."""
  return {
      "fits": all(found.fits for found in budgets),
      "budgets": [found.to_json() for found in budgets],
  }


def print_targets(
    targets: Iterable[Target], *, console: rich.console.Console
) -> None:
  """Prints a table of targets, one a line.

  Args:
    targets: What to print.
    console: Where to print.
  """
  from rich import table

  grid = table.Table(box=None, pad_edge=False)
  for column in ("target", "GPU", "arch"):
    grid.add_column(column, overflow="fold")
  for column in (
      "SMs", "SMEM bytes a block", "a SM", "TMEM columns", "registers a SM",
      "warpgroups a block", "largest cluster", "memory GB", "GB/s",
  ):
    grid.add_column(column, justify="right", overflow="fold")
  for target in targets:
    warpgroups = target.threads_per_block // budget_rows.THREADS_PER_WARPGROUP
    grid.add_row(
        target.name,
        target.description,
        target.arch,
        *map(
            str,
            (
                target.sm_count,
                target.smem_bytes_per_block,
                target.smem_bytes_per_sm,
                target.tmem_columns or "none",
                target.registers_per_sm,
                warpgroups,
                target.cluster_size_max,
                target.memory_bytes // 10**9,
                target.memory_bytes_per_s // 10**9,
            ),
        ),
    )
  console.print(grid)
