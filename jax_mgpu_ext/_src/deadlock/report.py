"""What a person reads of a kernel that hung: text, and the same as data.

A report holds no time, no address and no order of events in different threads, so
the same hang gives the same text.
"""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

from jax_mgpu_ext._src.deadlock import events
from jax_mgpu_ext._src.deadlock import source_lines
from jax_mgpu_ext._src.deadlock import wait_graph
from jax_mgpu_ext._src.deadlock import wording

TITLES = {
    "DL001": "wait cycle",
    "DL002": "missing arrival",
    "DL003": "arrival count never reached",
    "DL004": "phase overrun",
    "DL005": "wait cycle over a cluster barrier and a local one",
    "DL006": "collective not entered by all",
    "DL007": "arrivals pending at the end of a scope",
    "DL009": "time limit, a deadlock is suspected",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
  """Why a kernel did not end.

  Attributes:
    code: The catalog code, as `DL002`.
    problem: One sentence: which thread waits for what, where, and why in vain.
    cause: What is probably wrong, as far as the barriers tell; may be empty.
    threads: One entry for each thread: `thread`, `state`, `barrier`, `phase`,
      `line`, `visit` (how often it has waited at that line).
    barriers: One entry for each barrier that was arrived at or waited for:
      `barrier`, `kind`, `block`, `phase` (completions), `have`, `need`,
      `arrived`, `last_arrived`, `may_arrive`.
    last_events: Thread -> its last events, as text, oldest first.
    said: What JAX says by itself, if it does.
  """

  code: str
  problem: str
  cause: str
  threads: tuple[dict[str, Any], ...]
  barriers: tuple[dict[str, Any], ...]
  last_events: dict[str, tuple[str, ...]]
  said: str = ""

  @property
  def summary(self) -> str:
    """One line, with the code."""
    cause = f" {self.cause}" if self.cause else ""
    return f"{TITLES[self.code]}: {self.problem}{cause} [{self.code}]"

  def to_json(self) -> str:
    return json.dumps(dataclasses.asdict(self), indent=2)

  def __str__(self) -> str:
    lines = [self.summary, "", "Threads:"]
    lines += _table(self.threads, ("thread", "state", "barrier", "phase", "visit", "line"))
    lines += ["", "Barriers:"]
    lines += _table(
        self.barriers,
        ("barrier", "kind", "block", "phase", "have", "need", "arrived",
         "last_arrived", "may_arrive"),
    )
    lines += ["", "Last events of each thread:"]
    for thread, happened in self.last_events.items():
      lines.append(f"  {thread}")
      lines += [f"    {text}" for text in happened]
    return "\n".join(lines)


def _table(rows: Any, columns: tuple[str, ...]) -> list[str]:
  cells = [tuple(column.replace("_", " ") for column in columns)]
  for row in rows:
    cells.append(tuple(_cell(row[column]) for column in columns))
  widths = [max(map(len, column)) for column in zip(*cells)]
  return [
      "  " + "  ".join(c.ljust(w) for c, w in zip(row, widths)).rstrip()
      for row in cells
  ]


def _cell(value: Any) -> str:
  if value is None:
    return "-"
  if isinstance(value, (list, tuple)):
    return ", ".join(value) or "-"
  return str(value)


def make(run: Any, code: str | None, problem: str, state: Any, unit: Any) -> Report:
  """Returns the report of a run, judged now.

  Args:
    run: The `monitor.Run`; nothing in it may change meanwhile.
    code: What JAX has found by itself, or a time limit; None: to be judged.
    problem: Its words.
    state: The barrier that it is about.
    unit: The thread that it was found in.
  """
  picture = run.picture()
  names = wording.Names(picture)
  units = {u.key: u for u in run.units if not u.warps}
  cause = ""
  if code is None:
    verdict = wait_graph.judge(picture)
    code = verdict.code
    problem, cause = wording.sentences(verdict, names, units, picture)
  elif state is not None:
    return _of_exception(code, problem, state, unit, names)
  else:
    waiting = [
        f"{names.thread(u.key)} for {names.barrier(u.blocked.snapshot())}"
        for u in units.values() if u.blocked is not None
    ]
    problem += "; " + (
        "waiting: " + "; ".join(sorted(waiting)) if waiting else "nobody waits"
    ) + "."
    cause = "A thread that runs on and on may be waiting for a value in memory."
  grid = next((u.grid for u in units.values() if any(u.grid)), ())
  if grid:
    problem = f"at grid index {', '.join(map(str, grid))}: {problem}"
  return Report(
      code=code,
      problem=problem,
      cause=cause,
      threads=tuple(_threads(picture, names, units)),
      barriers=tuple(_barriers(run, picture, names)),
      last_events={
          names.thread(key): tuple(
              _event(event, names) for event in units[key].last
          )
          for key in sorted(units)
      },
  )


def threads_now(run: Any) -> list[str]:
  """Returns a line for each thread of a run, which may go on meanwhile."""
  names = wording.Names(run.picture())
  lines = []
  for unit in sorted(run.units, key=lambda unit: unit.key):
    if unit.warps:
      continue
    who = names.thread(unit.key)
    line = source_lines.line_of(unit.source)
    where = f" at {line}" if line else ""
    state = unit.blocked
    if unit.finished:
      lines.append(f"{who} has finished")
    elif state is None:
      lines.append(f"{who} runs" + (f"; its last event was{where}" if where else ""))
    else:
      barrier = state.snapshot()
      lines.append(
          f"{who} waits for {names.barrier(barrier)}{where}: {barrier.have} of"
          f" {barrier.need} arrivals"
      )
  return lines


def _of_exception(code, problem, state, unit, names) -> Report:
  """Returns the report for what JAX says by itself, while other threads run.

  Only what does not depend on how far they have come is in it.
  """
  barrier = state.snapshot()
  shown = {}
  if code == "DL004":
    line = source_lines.line_of(unit.source)
    who = names.thread(unit.key) + (f" at {line}" if line else "")
    text = re.sub(r"barrier \d{6,}", f"barrier `{barrier.name}`", problem)
    sentence = f"{who}, {names.barrier(barrier)}: {_first_line(text)}"
    shown = {names.thread(unit.key): tuple(
        _event(event, names) for event in unit.last
    )}
  elif code == "DL006":
    holders = names.threads(sorted(state.holders))
    sentence = (
        f"{names.barrier(barrier)} was allocated by {holders} alone:"
        " a pl.run_scoped with collective_axes is entered by all threads."
    )
  else:
    sentence = (
        f"{names.barrier(barrier)} has {barrier.have} of {barrier.need} arrivals in"
        f" phase {barrier.phase} when its scope ends; in all,"
        f" {_totals(state, names)}."
    )
  row = dict(
      barrier=barrier.name, kind=barrier.kind, block=barrier.block,
      phase=barrier.phase, have=barrier.have, need=barrier.need,
      arrived=[names.thread(key) for key in sorted(state.totals)],
      last_arrived=[], may_arrive=[],
  )
  return Report(
      code=code,
      problem=sentence,
      cause=_CAUSES[code],
      threads=(),
      barriers=(row,),
      last_events=shown,
      said=_first_line(problem),
  )


def _totals(state, names) -> str:
  parts = []
  for key, times in sorted(state.totals.items()):
    lines = sorted(
        {source_lines.line_of(s) for s in state.sources[key].values()} - {None}
    )
    where = f" at {' and '.join(lines)}" if lines else ""
    count = "once" if times == 1 else f"{times} times"
    parts.append(f"{names.thread(key)} arrived {count}{where}")
  return "; ".join(parts) or "nobody arrived"


_CAUSES = {
    "DL004": (
        "A thread that waits for a barrier must wait for every completion of it,"
        " before the next arrivals. If it does, somebody arrives too often, or"
        " num_arrivals (num_consumers of a ring) is too low."
    ),
    "DL006": "Enter the scope in every thread, and use it in those that need it.",
    "DL007": (
        "An arrival is missing, or one is too many; num_arrivals says how many"
        " make a phase."
    ),
}


def _threads(picture, names, units):
  for thread in picture.threads:
    unit = units.get(thread.key)
    row = dict(
        thread=names.thread(thread.key), state=thread.state, barrier=None,
        phase=None, line=None, visit=None,
    )
    if thread.barrier is not None and unit is not None:
      barrier = picture.barriers[thread.barrier]
      row.update(
          barrier=names.barrier(barrier).replace("`", ""), phase=barrier.phase,
          line=source_lines.line_of(unit.source),
          visit=unit.visits[id(unit.source)],
      )
    yield row


def _barriers(run, picture, names):
  candidates: dict[Any, set[str]] = {}
  waits = wait_graph.waits(picture)
  for wait in waits:
    candidates.setdefault(wait.barrier.key, set()).update(
        map(names.thread, wait.candidates)
    )
  states = {state.key: state for state in run.barriers}
  used = [
      barrier
      for barrier in picture.barriers.values()
      if barrier.phase or barrier.have or barrier.key in candidates
  ]
  for barrier in sorted(used, key=lambda b: (b.device, b.name, b.block)):
    last = states[barrier.key].last_arrived
    yield dict(
        barrier=barrier.name, kind=barrier.kind, block=barrier.block,
        phase=barrier.phase, have=barrier.have, need=barrier.need,
        arrived=[names.thread(key) for key in sorted(barrier.arrived)],
        last_arrived=[names.thread(key) for key in sorted(last)],
        may_arrive=sorted(candidates.get(barrier.key, ())),
    )


_VERBS = {
    events.ARRIVE: "arrived at",
    events.COMPLETE: "completed",
    events.WAIT: "waits for",
    events.RESUME: "went on after",
    events.COPY: "started a copy",
    events.LANDED: "had its copy land",
    events.ALLOCATE: "allocated",
    events.FREE: "freed",
    events.FINISH: "finished",
}


def _event(event: events.Event, names: wording.Names) -> str:
  text = _VERBS[event.kind]
  if event.barrier is not None:
    if event.kind in (events.COPY, events.LANDED):
      text += " for"
    text += f" {names.barrier(event.barrier)}"
    if event.kind not in (events.ALLOCATE, events.FREE):
      text += f", phase {event.phase}"
  line = source_lines.line_of(event.source)
  return f"{text} at {line}" if line else text


def _first_line(text: str) -> str:
  return text.strip().split("\n")[0]
