"""What a compiler wrote, PTX or SASS, as data."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping
import dataclasses

from jax_mgpu_ext._src.aot import opcode_classes


class AssemblyError(ValueError):
  """A text that is no PTX or SASS, or that is cut off.

  Attributes:
    line: The line, from 1, where something else was expected.
    problem: What was expected and what was found.
  """

  def __init__(self, problem: str, line: int):
    super().__init__(problem, line)
    self.problem = problem
    self.line = line

  def __str__(self) -> str:
    return f"line {self.line}: {self.problem}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceLine:
  """A line of the program that an instruction was compiled from.

  Attributes:
    file: The path as the compiler wrote it, empty where it gave none.
    line: The line, from 1.
  """

  file: str
  line: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Instruction:
  """One instruction.

  Attributes:
    opcode: The first word: `cp` of `cp.async.bulk`, `SYNCS` of `SYNCS.EXCH.64`.
    modifiers: The words after it, as ("async", "bulk").
    operands: All operands, as written but with single spaces.
    predicate: What it depends on, as `%p5` or `!UP1`; empty if on nothing.
    source: Where it comes from, None where the text does not say so.
  """

  opcode: str
  modifiers: tuple[str, ...] = ()
  operands: str = ""
  predicate: str = ""
  source: SourceLine | None = None

  @property
  def full_opcode(self) -> str:
    """The opcode with its modifiers, as `SYNCS.EXCH.64`."""
    return ".".join((self.opcode, *self.modifiers))

  @property
  def text(self) -> str:
    """The instruction without its predicate."""
    return f"{self.full_opcode} {self.operands}".rstrip()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Function:
  """A kernel, or a function that a kernel calls.

  Attributes:
    name: The name as the compiler wrote it.
    instructions: All instructions, in the order of the text.
    attributes: The PTX directives of its head with their numbers, as
      {"maxntid": (384, 1, 1), "explicitcluster": ()}. None in SASS.
    directives: Further PTX directives, as written but with single spaces: the
      words before the name, the parameters, variables, pragmas.
    labels: The instructions (by number) that labels stand before, and the
      labels. A name may occur again: inline assembly has names of its own.
  """

  name: str
  instructions: tuple[Instruction, ...] = ()
  attributes: Mapping[str, tuple[int, ...]] = dataclasses.field(
      default_factory=dict, hash=False
  )
  directives: tuple[str, ...] = ()
  labels: tuple[tuple[int, str], ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assembly:
  """All code of one PTX or SASS text.

  Attributes:
    kind: "ptx" or "sass".
    target: What it is for, as "sm_90a".
    version: The version of the PTX ISA, as "9.0"; empty for SASS.
    functions: The functions with a body, in the order of the text.
    directives: The declarations outside of functions, in PTX.
  """

  kind: str
  target: str
  version: str = ""
  functions: tuple[Function, ...] = ()
  directives: tuple[str, ...] = ()

  def instructions(self) -> Iterator[Instruction]:
    """Yields the instructions of all functions."""
    for function in self.functions:
      yield from function.instructions

  def opcode_counts(self) -> dict[str, int]:
    """Returns how often each opcode occurs, with its modifiers, by name."""
    counts = collections.Counter(i.full_opcode for i in self.instructions())
    return dict(sorted(counts.items()))

  def class_counts(self) -> dict[str, int]:
    """Returns how often each of `OPCODE_CLASSES` occurs, in that order."""
    counts = collections.Counter(
        opcode_classes.opcode_class(self.kind, i.text)
        for i in self.instructions()
    )
    return {name: counts[name] for name in opcode_classes.OPCODE_CLASSES}
