"""The events of interpreted kernels as a timeline to look at.

A tick is a step of logical time: an event comes one tick after whatever it had to
wait for, in its own thread and in others (Lamport's clock, the largest component of
a vector clock's causal order). So the picture shows what could overlap, is the same
for each run of a kernel that is free of races, and says nothing of durations.

The format is that of Chrome traces, which https://ui.perfetto.dev opens.
"""

from __future__ import annotations

from collections.abc import Iterable
import dataclasses
import json
import os
import pathlib
from typing import Any

from jax_mgpu_ext._src.deadlock import events
from jax_mgpu_ext._src.deadlock import source_lines

# Ticks from the start of a copy to its arrival; a nominal number.
_COPY_TICKS = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slice:
  """Something that lasts, on the track of a thread or of a barrier.

  Attributes:
    cluster: Which cluster of the grid.
    track: The name of the track.
    kind: `wait`, `arrive`, `copy`, `phase`, `stuck`, a wait without an end, or
      `lacks`, a phase that is never complete.
    name: What it is called.
    start: Its first tick.
    end: The tick after its last.
    line: The line of the kernel, or None.
  """

  cluster: int
  track: str
  kind: str
  name: str
  start: int
  end: int
  line: str | None

  @property
  def on_barrier(self) -> bool:
    return self.kind in ("phase", "lacks")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrow:
  """From an arrival to the completion, or from that to whoever waited for it."""

  cluster: int
  source: tuple[str, int]
  target: tuple[str, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timeline:
  """All that is drawn."""

  slices: tuple[Slice, ...]
  arrows: tuple[Arrow, ...]


def build(recorded: Iterable[events.Event]) -> Timeline:
  """Returns the timeline of events in the order in which they were recorded."""
  builder = _Builder()
  for event in recorded:
    builder.add(event)
  return builder.finish()


class _Builder:
  """Gives each event its tick."""

  def __init__(self):
    self._clocks: dict[Any, int] = {}
    self._completed: dict[Any, int] = {}
    self._filling: dict[Any, list[tuple[str, int]]] = {}
    self._waits: dict[Any, tuple[events.Event, int]] = {}
    self._copies: dict[Any, list[int]] = {}
    self._slices: list[Slice] = []
    self._arrows: list[Arrow] = []
    self._cluster = 0
    self._start = 0

  def add(self, event: events.Event) -> None:
    if event.cluster != self._cluster:
      # Clusters are interpreted one after the other.
      self._cluster = event.cluster
      self._start = max([self._start, *self._clocks.values()])
      self._clocks.clear()
    getattr(self, f"_{event.kind}", self._other)(event)

  def _tick(self, event: events.Event, after: int = 0) -> int:
    key = event.thread
    tick = max(self._clocks.get(key, self._start), after) + 1
    self._clocks[key] = tick
    return tick

  def _slice(self, event, track, kind, name, start, end) -> None:
    self._slices.append(
        Slice(
            cluster=event.cluster, track=track, kind=kind, name=name,
            start=start, end=end, line=source_lines.line_of(event.source),
        )
    )

  def _other(self, event: events.Event) -> None:
    del event

  def _copy(self, event: events.Event) -> None:
    tick = self._tick(event)
    self._copies.setdefault(event.thread, []).append(tick)

  def _landed(self, event: events.Event) -> None:
    start = self._copies[event.thread].pop()
    name = f"copy for {event.barrier.name}" if event.barrier else "copy to GMEM"
    track = f"{thread_name(event.thread)}, copies"
    self._slice(event, track, "copy", name, start, start + _COPY_TICKS)

  def _arrive(self, event: events.Event) -> None:
    copies = self._copies.get(event.thread)
    if copies:
      tick = copies[-1] + _COPY_TICKS
      track = f"{thread_name(event.thread)}, copies"
    else:
      tick = self._tick(event)
      track = thread_name(event.thread)
      self._slice(
          event, track, "arrive", f"arrive at {event.barrier.name}", tick,
          tick + 1,
      )
    self._filling.setdefault(id(event.barrier), []).append((track, tick))

  def _complete(self, event: events.Event) -> None:
    arrivals = self._filling.pop(id(event.barrier), [])
    first = min((tick for _, tick in arrivals), default=self._start)
    last = max((tick for _, tick in arrivals), default=self._start)
    self._completed[id(event.barrier), event.phase] = last
    track = barrier_track(event.barrier)
    self._slice(
        event, track, "phase", f"phase {event.phase}", first, last + 1
    )
    for source in arrivals:
      self._arrows.append(
          Arrow(cluster=event.cluster, source=source, target=(track, last))
      )

  def _wait(self, event: events.Event) -> None:
    self._waits[event.thread] = (event, self._tick(event))

  def _resume(self, event: events.Event) -> None:
    begun, start = self._waits.pop(event.thread)
    completed = self._completed.get((id(event.barrier), event.phase))
    end = self._tick(event, completed or 0)
    track = thread_name(event.thread)
    self._slice(
        begun, track, "wait", f"wait for {event.barrier.name}", start, end
    )
    if completed is not None:
      self._arrows.append(
          Arrow(
              cluster=event.cluster,
              source=(barrier_track(event.barrier), completed),
              target=(track, end - 1),
          )
      )

  def finish(self) -> Timeline:
    end = max([self._start, *self._clocks.values()]) + 2
    missing: dict[Any, Any] = {}
    for begun, start in self._waits.values():
      self._slice(
          begun, thread_name(begun.thread), "stuck",
          f"waits for {begun.barrier.name} for ever", start, end,
      )
      # The barrier's own track shows what it lacks.
      arrivals = self._filling.get(id(begun.barrier), [])
      first = min([start, *(tick for _, tick in arrivals)])
      missing[id(begun.barrier), begun.phase] = (begun, first, len(arrivals))
    for begun, first, have in missing.values():
      self._slice(
          begun, barrier_track(begun.barrier), "lacks",
          f"phase {begun.phase}: {have} of {begun.barrier.barrier.num_arrivals}"
          " arrivals", first, end,
      )
    order = lambda s: (s.cluster, s.track, s.start, s.end, s.kind, s.name)
    return Timeline(
        slices=tuple(sorted(self._slices, key=order)),
        arrows=tuple(sorted(
            self._arrows, key=lambda a: (a.cluster, a.source, a.target)
        )),
    )


def thread_name(key: tuple[int, int, int, int]) -> str:
  device, block, warpgroup, warp = key
  name = f"block {block}, warpgroup {warpgroup}"
  name += f", warp {warp}" if warp >= 0 else ""
  return f"device {device}, {name}" if device else name


def barrier_track(state: Any) -> str:
  return f"block {state.block}, {state.name}"


def to_chrome(timeline: Timeline) -> dict[str, Any]:
  """Returns a timeline in the format of Chrome traces; one tick is 1 us."""
  tracks = sorted({(s.cluster, s.on_barrier, s.track) for s in timeline.slices})
  numbers = {(c, track): i + 1 for i, (c, _, track) in enumerate(tracks)}
  out: list[dict[str, Any]] = []
  for cluster in sorted({cluster for cluster, _, _ in tracks}):
    out.append(dict(
        ph="M", name="process_name", pid=cluster,
        args=dict(name=f"cluster {cluster}"),
    ))
  for cluster, _, track in tracks:
    out.append(dict(
        ph="M", name="thread_name", pid=cluster, tid=numbers[cluster, track],
        args=dict(name=track),
    ))
  for number, item in enumerate(timeline.slices):
    place = dict(pid=item.cluster, tid=numbers[item.cluster, item.track])
    args = dict(line=item.line) if item.line else {}
    common = dict(name=item.name, cat=item.kind, args=args, **place)
    if item.kind == "copy":
      # Copies overlap each other, and so are asynchronous.
      out.append(dict(ph="b", id=number, ts=item.start, **common))
      out.append(dict(ph="e", id=number, ts=item.end, **common))
    else:
      out.append(
          dict(ph="X", ts=item.start, dur=item.end - item.start, **common)
      )
  for number, arrow in enumerate(timeline.arrows):
    for phase, (track, tick) in (("s", arrow.source), ("f", arrow.target)):
      if (arrow.cluster, track) not in numbers:
        continue
      out.append(dict(
          ph=phase, id=number, ts=tick, name="arrival", cat="arrival",
          pid=arrow.cluster, tid=numbers[arrow.cluster, track],
          **(dict(bp="e") if phase == "f" else {}),
      ))
  return dict(
      traceEvents=out,
      displayTimeUnit="ms",
      otherData=dict(unit="1 us is one tick of logical time, no duration"),
  )


def check_path(path: str | os.PathLike[str]) -> None:
  """Checks, before a kernel runs, that its timeline can be written.

  Raises:
    ImportError: It would be a picture, and matplotlib is not installed.
    OSError: There is no such folder, or the file cannot be written.
    ValueError: It has another ending than .json or .png.
  """
  path = pathlib.Path(path)
  if path.suffix.lower() not in (".json", ".png"):
    raise ValueError(
        f"expected a name that ends in .json or .png, got {str(path)!r}"
    )
  if path.is_dir():
    raise IsADirectoryError(f"expected the name of a file, got the folder {path}")
  if not os.access(path.parent, os.W_OK):
    raise FileNotFoundError(f"cannot write to the folder {path.parent}")
  if path.suffix.lower() == ".png":
    try:
      import matplotlib as _  # pylint: disable=g-import-not-at-top
    except ImportError as e:
      raise ImportError(
          "drawing a timeline needs matplotlib: pip install 'jax-mgpu-ext[plot]'"
      ) from e


def write(timeline: Timeline, path: str | os.PathLike[str]) -> None:
  """Writes a timeline: as a picture, if the name ends in .png, else as JSON."""
  path = pathlib.Path(path)
  if path.suffix.lower() == ".png":
    draw(timeline, path)
    return
  text = json.dumps(to_chrome(timeline), indent=1)
  # Whole or not at all.
  part = path.with_name(path.name + ".part")
  part.write_text(text + "\n", encoding="utf-8")
  part.replace(path)


_COLOURS = {
    "wait": "#c8c8c8", "arrive": "#2a9d3f", "copy": "#3b78c4",
    "phase": "#e0a030", "stuck": "#d03030", "lacks": "#f0b0a0",
}


def draw(timeline: Timeline, path: pathlib.Path) -> None:
  """Draws the first cluster of a timeline as a PNG."""
  import matplotlib  # pylint: disable=g-import-not-at-top

  matplotlib.use("Agg")
  from matplotlib import patches  # pylint: disable=g-import-not-at-top
  from matplotlib import pyplot  # pylint: disable=g-import-not-at-top

  first = min((s.cluster for s in timeline.slices), default=0)
  slices = [s for s in timeline.slices if s.cluster == first]
  tracks = sorted({(s.on_barrier, s.track) for s in slices})
  rows = {track: -row for row, (_, track) in enumerate(tracks)}
  end = max((s.end for s in slices), default=1)
  figure, axes = pyplot.subplots(
      figsize=(min(4 + 0.12 * end, 24), 1.5 + 0.32 * len(tracks))
  )
  for item in slices:
    axes.broken_barh(
        [(item.start, item.end - item.start)], (rows[item.track] - 0.4, 0.8),
        color=_COLOURS[item.kind], edgecolor="white", linewidth=0.5,
    )
    if item.kind in ("stuck", "lacks"):
      axes.text(
          item.start + 0.2, rows[item.track], item.name, fontsize=6,
          verticalalignment="center", clip_on=True,
      )
  for arrow in timeline.arrows:
    (source, start), (target, stop) = arrow.source, arrow.target
    if arrow.cluster == first and source in rows and target in rows:
      axes.annotate(
          "", xy=(stop + 0.5, rows[target]), xytext=(start + 0.5, rows[source]),
          arrowprops=dict(arrowstyle="->", color="#606060", lw=0.5, alpha=0.6),
      )
  axes.set_yticks(list(rows.values()), list(rows), fontsize=8)
  axes.set_xlabel("logical time (causal order, no durations)")
  used = [kind for kind in _COLOURS if any(s.kind == kind for s in slices)]
  axes.legend(
      handles=[patches.Patch(color=_COLOURS[kind], label=kind) for kind in used],
      loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(used), fontsize=8,
      frameon=False,
  )
  figure.savefig(path, dpi=110, bbox_inches="tight")
  pyplot.close(figure)
