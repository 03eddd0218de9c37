"""Reads SASS, as nvdisasm writes it and as Mosaic dumps it.

`nvdisasm -c`, with or without `-hex`, `-g`, `-gi` and `-plr`, writes

          /*00c0*/               @!P0 SHFL.IDX PT, R4, R0, RZ, 0x1f ;

and Mosaic's dump (`sass_ctrl`) writes the control codes first (which barriers
to wait for, which to set for reads and writes, may it yield, cycles to stall),
and no semicolon:

     1:-:-:Y:01   /*00c0*/               @!P0 SHFL.IDX PT, R4, R0, RZ, 0x1f

Control codes are left out. A predicate of the uniform datapath (`@UP0`) stands
a little further to the right. Functions that ptxas adds, as for a division or
to trap, stand in the section of the kernel that calls them.
"""

from __future__ import annotations

import re

from jax_mgpu_ext._src import errors
from jax_mgpu_ext._src.aot import code_model

_TARGET = re.compile(r"\s*\.target\s+(\w+)", re.ASCII)
_SECTION = re.compile(r"\s*\.section\s+([^\s,]+)")
_TYPE = re.compile(r"\s*\.type\s+([^\s,]+),@function")
_LABEL = re.compile(r"([^\s:/]+):\s*")
_SOURCE = re.compile(r'\s*//## File "([^"]*)", line (\d{1,9})\b', re.ASCII)
_LINE = re.compile(
    r"\s*(?:([-\w&]+(?::[-\w&]+){4})\s+)?/\*([0-9a-f]{4,16})\*/\s+(.*)",
    re.ASCII,
)
_HEX_ONLY = re.compile(r"\s*/\* 0x[0-9a-f]+ \*/\s*", re.ASCII)
_INSTRUCTION = re.compile(
    r"(?:@(!?U?P[\dT])\s+)?([A-Z][A-Z0-9_]*)((?:\.\w+)*)(?:\s+(.*))?", re.ASCII
)


def parse_sass(text: str) -> code_model.Assembly:
  """Reads SASS.

  Args:
    text: What nvdisasm wrote of one cubin, or a dump of Mosaic.

  Returns:
    Its code, without control codes and addresses.

  Raises:
    AssemblyError: If something else was expected, or there is no function.
  """
  reader = _Reader()
  lines = text.split("\n")
  for number, line in enumerate(lines, 1):
    reader.line(number, line)
  return reader.end(len(lines))


class _Reader:
  """Takes line after line."""

  def __init__(self):
    self._target = ""
    self._in_code = False
    self._declared: set[str] = set()
    self._functions: list[code_model.Function] = []
    self._name = ""
    self._instructions: list[code_model.Instruction] = []
    self._labels: list[tuple[int, str]] = []
    self._source: code_model.SourceLine | None = None
    # Of several lines about the source only the first counts: the others say
    # where that was inlined.
    self._source_is_new = False

  def line(self, number: int, line: str) -> None:
    """Reads a line."""
    if match := _SOURCE.match(line):
      if not self._source_is_new:
        self._source = code_model.SourceLine(
            file=match[1], line=int(match[2])
        )
      self._source_is_new = True
      return
    line = line.partition("//")[0]
    if match := _SECTION.match(line):
      self._end_function()
      self._in_code = match[1].startswith(".text.")
    elif match := _TARGET.match(line):
      self._target = match[1]
    elif self._in_code:
      self._code_line(number, line)

  def end(self, number: int) -> code_model.Assembly:
    """Returns what has been read, at the end of the text."""
    self._end_function()
    if not self._functions:
      raise code_model.AssemblyError(
          "expected a function in a section .text, but there is nothing more",
          number,
      )
    return code_model.Assembly(
        kind="sass", target=self._target, functions=tuple(self._functions)
    )

  def _code_line(self, number: int, line: str) -> None:
    """Reads a line of a section with code."""
    if match := _LINE.match(line):
      if not self._name:
        raise _error(number, "the name of a function", line)
      self._instructions.append(self._instruction(number, *match.groups()))
      self._source_is_new = False
    elif match := _LABEL.fullmatch(line):
      self._label(match[1])
    elif match := _TYPE.match(line):
      self._declared.add(match[1])
    elif not (
        not line.strip() or line.lstrip().startswith(".")
        or _HEX_ONLY.fullmatch(line)
    ):
      raise _error(number, "an instruction, a label or a directive", line)

  def _instruction(
      self, number: int, control: str | None, address: str, rest: str
  ) -> code_model.Instruction:
    del address
    statement, semicolon, _ = rest.partition(";")
    if control is not None:
      statement = rest
    elif not semicolon:
      raise _error(number, "an instruction that ends with ';'", rest)
    match = _INSTRUCTION.fullmatch(" ".join(statement.split()))
    if match is None:
      raise _error(number, "an instruction", rest)
    predicate, opcode, modifiers, operands = match.groups()
    return code_model.Instruction(
        opcode=opcode,
        modifiers=tuple(modifiers.split(".")[1:]),
        operands=operands or "",
        predicate=predicate or "",
        source=self._source,
    )

  def _label(self, name: str) -> None:
    if name in self._declared:
      self._end_function()
      self._name = name
    elif not name.startswith(".text."):
      self._labels.append((len(self._instructions), name))
    elif not self._name:  # The line `.type` is missing.
      self._name = name.removeprefix(".text.")

  def _end_function(self) -> None:
    if self._instructions:
      self._functions.append(code_model.Function(
          name=self._name,
          instructions=tuple(self._instructions),
          labels=tuple(self._labels),
      ))
    self._name = ""
    self._instructions = []
    self._labels = []
    self._source = None
    self._source_is_new = False


def _error(number: int, expected: str, line: str) -> code_model.AssemblyError:
  found = errors.one_line(line, 60)
  return code_model.AssemblyError(f"expected {expected}, got {found!r}", number)
