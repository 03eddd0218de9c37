"""What is asked of the stages that depend on it."""

from __future__ import annotations

import dataclasses
from typing import Any

# What the stage `compile` can write to files.
EMITTED = ("ptx", "sass", "mlir", "resources", "xla")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
  """What is asked of a stage.

  Attributes:
    targets: Targets to budget and to compile for.
    sass: Whether the machine code is wanted.
    cache: Whether compiled kernels are looked for, and kept, on disk.
    emit: What to write to files, of `EMITTED`.
    out: The folder for these files, and for reports of the stage `interpret`.
    trace: The file for the timeline of the interpreted kernel.
  """

  targets: tuple[str, ...] = ()
  sass: bool = True
  cache: bool = True
  emit: tuple[str, ...] = ()
  out: str = ""
  trace: str = ""

  def to_json(self) -> dict[str, Any]:
    return dataclasses.asdict(self)


def from_json(document: dict[str, Any]) -> Options:
  """Returns what `Options.to_json` has described."""
  return Options(**{
      key: tuple(value) if isinstance(value, list) else value
      for key, value in document.items()
  })


def file_stem(name: str) -> str:
  """Returns how a case, with its parameter, or a target is called in files."""
  stem = "".join(c if c.isalnum() or c in "-_+" else "-" for c in name)
  return stem.strip("-") or "case"
