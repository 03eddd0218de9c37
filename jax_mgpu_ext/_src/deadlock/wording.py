"""How threads, barriers and verdicts are put into words."""

from __future__ import annotations

from typing import Any

from jax_mgpu_ext._src.deadlock import source_lines
from jax_mgpu_ext._src.deadlock import wait_graph


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

  def threads(self, keys: Any) -> str:
    return " and ".join(f"{self.thread(key)}" for key in keys)

  def barrier(self, barrier: Any) -> str:
    return f"`{barrier.name}`" + (
        f" of block {barrier.block}" if self._blocks else ""
    )


def sentences(verdict, names, units, picture) -> tuple[str, str]:
  """Returns what a verdict says, and what is probably wrong."""
  first = verdict.waits[0]
  if len({wait.barrier.key for wait in verdict.waits}) < len(verdict.waits):
    who = names.threads([wait.thread for wait in verdict.waits])
    line = _line(first, units) or "an unknown line"
    return (
        f"{who} wait for {names.barrier(first.barrier)},"
        f" {names.thread(first.thread)} at {line}, and nobody else is there to"
        " arrive.",
        "Whoever arrives must do so before it waits, or an arrival is missing.",
    )
  if verdict.code in ("DL001", "DL005"):
    parts = []
    for wait, following in zip(
        verdict.waits, verdict.waits[1:] + verdict.waits[:1]
    ):
      parts.append(
          f"{_waits_for(wait, names, units)} ({wait.barrier.have} of"
          f" {wait.barrier.need} arrivals in phase {wait.barrier.phase}), at which"
          f" {names.thread(following.thread)} would have to arrive"
      )
    cause = (
        "One of them must arrive before it waits; or it has passed the place where"
        " it should have arrived, released or copied."
    )
    if verdict.code == "DL005":
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
    here = names.threads(sorted(barrier.arrived))
    return (
        f"{sentence}: {here} arrived, and nobody else can.",
        f"The spec wants {barrier.need} arrivals{_of_blocks(barrier)};"
        f" num_arrivals, num_consumers or"
        f" transfers_per_stage is too high, or an arrival is missing.",
    )
  if wait.gone:
    who = names.threads(wait.gone)
    is_known = all(key in barrier.usual for key in wait.gone)
    when = "in earlier phases" if is_known else "at other elements of the array"
    verb = "has" if len(wait.gone) == 1 else "have"
    return (
        f"{sentence}: {who}, which arrived {when}, {verb} finished.",
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


def _of_blocks(barrier) -> str:
  if barrier.kind != wait_graph.CLUSTER_BARRIER:
    return ""
  blocks = len(barrier.scope)
  return f" ({barrier.need // blocks} of each of {blocks} blocks)"


def _line(wait, units) -> str | None:
  unit = units.get(wait.thread)
  return source_lines.line_of(unit.source) if unit is not None else None


def _waits_for(wait, names, units) -> str:
  line = _line(wait, units)
  return (
      f"{names.thread(wait.thread)} waits for {names.barrier(wait.barrier)}"
      + (f" at {line}" if line else "")
  )
