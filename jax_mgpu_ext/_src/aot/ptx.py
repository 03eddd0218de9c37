"""Reads PTX, as LLVM, NVVM and ptxas know it.

The grammar is that of the PTX ISA manual, "Syntax" and "Directives", as far as
compilers write it: there are no preprocessor lines. What stands between `//
begin inline asm` and `// end inline asm` is read like the rest. A block of it
has registers and labels of its own; Mosaic's waits all call theirs `P1` and
`LAB_WAIT`.

Each step reads some of the text and never goes back, so that the time is linear
in the size of the text, whatever it holds.
"""

from __future__ import annotations

import dataclasses
import re

from jax_mgpu_ext._src import errors
from jax_mgpu_ext._src.aot import code_model

# The possessive `++`, `*+` and the open ends keep all of these linear.
_COMMENT = re.compile(r'"[^"\n]*"|//[^\n]*|/\*.*?(?:\*/|\Z)', re.DOTALL)
_SPACE = re.compile(r"\s*", re.ASCII)
_VERSION = re.compile(r"^[ \t]*\.version\b", re.MULTILINE)
_FILE = re.compile(
    r'^[ \t]*\.file[ \t]+(\d{1,9})[ \t]+"([^"\n]*)"', re.MULTILINE | re.ASCII
)
# These end with their line, all others with a semicolon.
_LINE_DIRECTIVE = re.compile(
    r"\.(version|target|address_size|file|loc)\b([^\n]*)", re.ASCII
)
_SECTION = re.compile(r"\.section\b[^{}]*+\{[^{}]*+\}", re.ASCII)
_STATEMENT = re.compile(r'((?:[^;"]++|"[^"\n]*+")*+);')
# What stands outside of functions, up to its semicolon or a function's body.
_HEAD = re.compile(r'((?:[^;{"=]++|"[^"\n]*+")*+)[;{=]')
_FUNCTION = re.compile(
    r"((?:\.\w++\s*+)*?\.(?:entry|func)\b)\s*+(\([^()]*+\))?\s*+([\w$%.]++)\s*+"
    r"(\([^()]*+\))?",
    re.ASCII,
)
_ATTRIBUTE = re.compile(r"\.(\w++)([\d,\s]*+)", re.ASCII)
_LOC = re.compile(r"\s+(\d{1,9})\s+(\d{1,9})\b", re.ASCII)
_LABEL = re.compile(r"([\w$%.]++)\s*+:(?!:)", re.ASCII)
_INSTRUCTION = re.compile(
    r"(?:@\s*(!?)\s*([%\w$]++)\s++)?([A-Za-z_][\w.:]*+)"
    r"(?:\s++|(?=[({\[])|\Z)(.*)",
    re.ASCII | re.DOTALL,
)


def parse_ptx(text: str) -> code_model.Assembly:
  """Reads PTX.

  Args:
    text: The text of one module, or of several on end.

  Returns:
    Its code. Declarations of registers are left out.

  Raises:
    AssemblyError: If something else was expected, or there is no function.
  """
  return _Reader(text).module()


class _Reader:
  """One pass over a text."""

  def __init__(self, text: str):
    self._files: dict[int, str] = {}
    self._text = _COMMENT.sub(_without_comment, text)
    self._at = 0

  def module(self) -> code_model.Assembly:
    """Reads all of the text."""
    facts = {"version": "", "target": ""}
    functions = []
    directives = []
    while self._skip_space():
      if match := self._take(_LINE_DIRECTIVE):
        name, value = match.groups()
        if name in facts:
          facts[name] = " ".join(value.split())
        if name == "version":
          self._read_files()
      elif self._text.startswith(".section", self._at):
        self._take(_SECTION, "a section with a body in braces")
      else:
        start = self._at
        head = self._take(_HEAD, "a directive that ends with ';'")
        declared = _FUNCTION.match(head[1])
        if declared and head[0].endswith("{"):
          functions.append(self._function(head[1], declared))
          continue
        self._at = start
        directives.append(self._statement("a directive"))
        if not directives[-1].startswith("."):
          raise self._error("a directive", start)
    for name, value in facts.items():
      if not value:
        raise self._error(f".{name}", 0)
    if not functions:
      raise self._error("a function", self._at)
    return code_model.Assembly(
        kind="ptx",
        target=facts["target"],
        version=facts["version"],
        functions=tuple(functions),
        directives=tuple(directives),
    )

  def _function(
      self, head: str, declared: re.Match[str]
  ) -> code_model.Function:
    """Reads the body of a function, from its brace on."""
    words, results, name, parameters = declared.groups()
    directives = [" ".join(words.split())]
    for group in (results, parameters):
      for parameter in (group or "()")[1:-1].split(","):
        directives += [" ".join(parameter.split())] if parameter.strip() else []
    body = _Body()
    depth = 1
    source = None
    while depth:
      if not self._skip_space():
        raise self._error(f"'}}' at the end of {name!r}", self._at)
      character = self._text[self._at]
      if character in "{}":
        depth += 1 if character == "{" else -1
        self._at += 1
      elif match := self._take(_LINE_DIRECTIVE):
        if match[1] == "loc":
          source = self._source(match[2])
      elif match := self._take(_LABEL):
        body.labels.append((len(body.instructions), match[1]))
      else:
        self._body_statement(body, source)
    return code_model.Function(
        name=name,
        instructions=tuple(body.instructions),
        attributes={
            key: tuple(int(n) for n in re.findall(r"\d{1,9}", numbers))
            for key, numbers in _ATTRIBUTE.findall(head, declared.end())
        },
        directives=(*directives, *body.directives),
        labels=tuple(body.labels),
    )

  def _body_statement(
      self, body: _Body, source: code_model.SourceLine | None
  ) -> None:
    start = self._at
    statement = self._statement("an instruction")
    if statement.startswith("."):
      if not statement.startswith(".reg "):
        body.directives.append(statement)
    elif match := _INSTRUCTION.fullmatch(statement):
      negated, predicate, opcode, operands = match.groups()
      opcode, *modifiers = opcode.split(".")
      body.instructions.append(code_model.Instruction(
          opcode=opcode,
          modifiers=tuple(modifiers),
          operands=operands,
          predicate=f"{negated or ''}{predicate or ''}",
          source=source,
      ))
    elif statement:
      raise self._error("an instruction", start)

  def _source(self, location: str) -> code_model.SourceLine | None:
    """Reads `.loc`; the place of inlined code is that of its definition."""
    match = _LOC.match(location)
    if match is None:
      raise self._error(".loc with a file and a line", self._at - len(location))
    file, line = map(int, match.groups())
    if not line:  # Nothing in the program stands for it.
      return None
    return code_model.SourceLine(file=self._files.get(file, ""), line=line)

  def _read_files(self) -> None:
    """Reads the names of the files of a module, which stand at its end."""
    following = _VERSION.search(self._text, self._at)
    end = following.start() if following else len(self._text)
    self._files = {
        int(number): path
        for number, path in _FILE.findall(self._text, self._at, end)
    }

  def _skip_space(self) -> bool:
    """Goes on to the next word; False at the end of the text."""
    self._at = _SPACE.match(self._text, self._at).end()
    return self._at < len(self._text)

  def _statement(self, expected: str) -> str:
    """Reads on to a semicolon; returns the text before it on one line."""
    start = self._at
    text = self._take(_STATEMENT, f"{expected} that ends with ';'")[1]
    if not _balanced(text):  # The semicolon is that of another statement.
      raise self._error(f"{expected} that ends with ';'", start)
    return " ".join(text.split())

  def _take(
      self, pattern: re.Pattern[str], expected: str = ""
  ) -> re.Match[str] | None:
    match = pattern.match(self._text, self._at)
    if match is not None:
      self._at = match.end()
    elif expected:
      raise self._error(expected, self._at)
    return match

  def _error(self, expected: str, at: int) -> code_model.AssemblyError:
    line = self._text.count("\n", 0, at) + 1
    found = errors.one_line(self._text[at : at + 200], 60)
    return code_model.AssemblyError(
        f"expected {expected}, got {found!r}" if found
        else f"expected {expected}, but there is nothing more",
        line,
    )


@dataclasses.dataclass
class _Body:
  """What has been read of a function's body."""

  instructions: list[code_model.Instruction] = dataclasses.field(
      default_factory=list
  )
  directives: list[str] = dataclasses.field(default_factory=list)
  labels: list[tuple[int, str]] = dataclasses.field(default_factory=list)


def _balanced(text: str) -> bool:
  """Returns whether all braces of a statement are closed."""
  depth = 0
  for brace in re.findall("[{}]", text):
    depth += 1 if brace == "{" else -1
    if depth < 0:
      return False
  return depth == 0


def _without_comment(match: re.Match[str]) -> str:
  """Returns what to put in place of a comment; keeps lines and strings."""
  text = match[0]
  return text if text.startswith('"') else " " + "\n" * text.count("\n")
