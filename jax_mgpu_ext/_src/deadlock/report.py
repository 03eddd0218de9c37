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


class Names:
  """Writes threads and barriers as briefly as they stay distinct."""

  def __init__(self, picture: wait_graph.Picture):
    keys = [thread.key for thread in picture.threads]
    self._devices = len({key[0] for key in keys}) > 1
    self._blocks = len({key[1] for key in keys}) > 1

  def thread(self, key: wait_graph.ThreadKey) -> str:
    device, block, warpgroup, warp = key
    parts = [f"device {device}"] if self._devices else []
    parts += [f"block {block}"] if self._blocks else []
    parts.append(f"warpgroup {warpgroup}")
    parts += [f"warp {warp}"] if warp >= 0 else []
    return ", ".join(parts)

  def barrier(self, barrier: wait_graph.Barrier) -> str:
    return f"`{barrier.name}`" + (
        f" of block {barrier.block}" if self._blocks else ""
    )


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
  names = Names(picture)
  units = {u.key: u for u in run.units if not u.warps}
  cause = ""
  if code is None:
    verdict = wait_graph.judge(picture)
    code = verdict.code
    problem, cause = _sentences(verdict, names, units, picture)
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


def _of_exception(code, problem, state, unit, names) -> Report:
  """Returns the report for what JAX says by itself, while other threads run.

  Only what does not depend on how far they have come is in it.
  """
  barrier = state.snapshot()
  last = state.last_arrived if code == "DL004" else state.arrived
  arrived = [names.thread(key) for key in sorted(last)]
  if code == "DL004":
    line = source_lines.line_of(unit.source)
    who = names.thread(unit.key) + (f" at {line}" if line else "")
    shown = {names.thread(unit.key): tuple(
        _event(event, names) for event in unit.last
    )}
  else:
    # Whoever leaves the scope last finds it out: that is any of them.
    who = " and ".join(arrived)
    lines = {source_lines.line_of(s) for s in state.sources.values()} - {None}
    who += f" arrived at {', '.join(sorted(lines))}" if lines else " arrived"
    shown = {}
  row = dict(
      barrier=barrier.name, kind=barrier.kind, block=barrier.block,
      phase=barrier.phase, have=barrier.have, need=barrier.need,
      arrived=arrived, last_arrived=[], may_arrive=[],
  )
  text = re.sub(r"barrier \d{6,}", f"barrier `{barrier.name}`", problem)
  return Report(
      code=code,
      problem=f"{who}, {names.barrier(barrier)}: {_first_line(text)}",
      cause=_CAUSES[code],
      threads=(),
      barriers=(row,),
      last_events=shown,
      said=_first_line(problem),
  )


_CAUSES = {
    "DL004": (
        "A thread that waits for a barrier must wait for every completion of it,"
        " before the next arrivals. If it does, more arrivals come than"
        " num_arrivals, or num_consumers of a ring, says."
    ),
    "DL007": "Wait for the last completion before the scope ends.",
}


def _sentences(verdict, names, units, picture) -> tuple[str, str]:
  first = verdict.waits[0]
  if len({wait.barrier.key for wait in verdict.waits}) < len(verdict.waits):
    who = " and ".join(names.thread(wait.thread) for wait in verdict.waits)
    return (
        f"{who} wait for {names.barrier(first.barrier)},"
        f" {names.thread(first.thread)} at {_line(first, names, units)}, and nobody else is there to arrive.",
        "Whoever arrives must do so before it waits.",
    )
  if verdict.code in ("DL001", "DL005"):
    parts = []
    for wait, following in zip(
        verdict.waits, verdict.waits[1:] + verdict.waits[:1]
    ):
      parts.append(
          f"{_waits_for(wait, names, units)}, at which"
          f" {names.thread(following.thread)} would have to arrive"
      )
    cause = ""
    if len(verdict.waits) == 1:
      cause = "A thread cannot arrive at what it waits for: arrive first."
    elif verdict.code == "DL005":
      cause = (
          "Arrive at the local barrier before waiting for the cluster, or wait"
          " for them in the same order everywhere."
      )
    return "; ".join(parts) + ".", cause
  (wait,) = verdict.waits
  barrier = wait.barrier
  sentence = (
      f"{_waits_for(wait, names, units)}, which got {barrier.have} of"
      f" {barrier.need} arrivals in phase {barrier.phase}"
  )
  finished = [t.key for t in picture.threads if t.state == "finished"]
  if verdict.code == "DL006" and barrier.kind == wait_graph.CLUSTER_BARRIER:
    missing = sorted(barrier.scope - {key[1] for key in barrier.arrived})
    who = ", ".join(f"block {block}" for block in missing)
    return f"{sentence}: {who} did not arrive.", (
        "Every block of the cluster must arrive in every phase."
    )
  if verdict.code == "DL006":
    return f"{sentence}.", "All its warpgroups must come to a named barrier."
  if verdict.code == "DL003":
    here = ", ".join(map(names.thread, sorted(barrier.arrived)))
    return (
        f"{sentence}: {here} arrived, and nobody else can.",
        f"The spec wants {barrier.need} arrivals; num_arrivals, num_consumers or"
        f" transfers_per_stage is too high, or an arrival is missing.",
    )
  if wait.gone:
    who = ", ".join(map(names.thread, wait.gone))
    verb = "has" if len(wait.gone) == 1 else "have"
    return (
        f"{sentence}: {who}, which arrived in earlier phases, {verb} finished.",
        f"{who} left its loop too early, or the waiting thread goes on too long.",
    )
  if wait.thread in barrier.usual:
    return (
        f"{sentence}: {names.thread(wait.thread)} itself arrived in earlier phases.",
        "Its arrival, or the copy that arrives for it, must come before the wait.",
    )
  if finished:
    return (
        f"{sentence}, and all who could arrive have finished.",
        "An arrival, a commit, a release or a copy is missing.",
    )
  return f"{sentence}, and nobody is there to arrive.", (
      "An arrival, a commit, a release or a copy is missing."
  )


def _line(wait, names, units) -> str:
  return _waits_for(wait, names, units).partition(" at ")[2] or "an unknown line"


def _waits_for(wait, names, units) -> str:
  unit = units.get(wait.thread)
  line = source_lines.line_of(unit.source) if unit is not None else None
  return (
      f"{names.thread(wait.thread)} waits for {names.barrier(wait.barrier)}"
      + (f" at {line}" if line else "")
  )


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
          barrier=names.barrier(barrier), phase=barrier.phase,
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
    events.COPY: "started a copy for",
    events.LANDED: "had its copy land for",
    events.ALLOCATE: "allocated",
    events.FREE: "freed",
    events.FINISH: "finished",
}


def _event(event: events.Event, names: Names) -> str:
  text = _VERBS[event.kind]
  if event.barrier is not None:
    text += f" `{event.barrier.name}`"
    if event.kind not in (events.ALLOCATE, events.FREE):
      text += f", phase {event.phase}"
  line = source_lines.line_of(event.source)
  return f"{text} at {line}" if line else text


def _first_line(text: str) -> str:
  return text.strip().split("\n")[0]
