"""Compares code, whatever its kernels, registers and labels are called.

The time is bounded for any two texts: alignment gives up after a number of
steps, and then shows all that lies between the first and the last difference.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import itertools
import re

from jax_mgpu_ext._src.aot import code_model

# Special registers with a number in their name; the chapter "Special Registers"
# of the PTX ISA manual. All others with a number are virtual.
_VIRTUAL = r"%(?!(?:clock|envreg|pm)\d)[a-z]+\d+"
_NAMES = {
    "ptx": re.compile(r"(?<![\w$.%])[%$A-Za-z_][\w$]*", re.ASCII),
    "sass": re.compile(r"(?<![\w$.%])[.$A-Za-z_][\w$.]*", re.ASCII),
}
_VIRTUAL_NAME = re.compile(_VIRTUAL, re.ASCII)
# What a normal form renamed: registers, labels, functions and symbols.
_RENAMED = re.compile(rf"{_VIRTUAL}|\$[LFS]\d+", re.ASCII)
_VARIABLE = re.compile(
    r"\.(?:param|shared|local|global|const|visible|weak|common)\b"
)
_CONTEXT = 3
# Differences, and steps in all, that an alignment may take.
_MAX_EDITS = 1000
_MAX_STEPS = 2_000_000


def normal_form(assembly: code_model.Assembly) -> tuple[str, ...]:
  """Returns code without what has no meaning.

  One line for each instruction, and one for each directive and each label that
  something refers to. Functions, variables, labels and the virtual registers
  of each class are numbered as they appear: `$F0`, `$S0`, `$L0`, `%rd0`. What
  is declared elsewhere (`.extern`) keeps its name, and so do registers of
  SASS, which are physical. Left out: source lines, the version of the PTX ISA,
  hints to the operand cache (`.reuse`), which belong to the control codes, and
  the NOPs at the end of SASS, which some options of nvdisasm leave out too.

  Args:
    assembly: The code.
  """
  return tuple(_Normaliser(assembly).lines())


def diff(
    a: code_model.Assembly, b: code_model.Assembly
) -> tuple[str, ...]:
  """Returns the lines of a unified diff of two normal forms.

  Registers and labels of `b` are shown with their names in `a`, so that one
  more register does not change every line after it.

  Args:
    a: The code before.
    b: The code after.

  Returns:
    The lines, without line ends; none only if the normal forms are equal.
  """
  old, new = normal_form(a), normal_form(b)
  if old == new:
    return ()
  pairs = _aligned([_masked(x) for x in old], [_masked(x) for x in new])
  lines = _unified(old, _named_alike(old, new, pairs), pairs)
  # Names that were swapped are such a difference: nothing else shows it.
  return lines or _unified(old, new, _aligned(old, new))


class _Normaliser:
  """Renames in order of appearance."""

  def __init__(self, assembly: code_model.Assembly):
    self._assembly = assembly
    self._names = _NAMES[assembly.kind]
    self._symbols: dict[str, str] = {}
    self._registers: dict[str, str] = {}
    self._labels: dict[str, str] = {}
    self._used_labels: set[str] = set()
    # Numbers go on from function to function, so that none occurs twice.
    self._counts: dict[str, int] = {}

  def lines(self) -> Iterator[str]:
    """Yields the normal form."""
    functions = {
        f"$F{n}": function
        for n, function in enumerate(self._assembly.functions)
    }
    self._symbols = {function.name: n for n, function in functions.items()}
    # Of a function with a body another declaration says nothing new.
    directives = [
        d for d in self._assembly.directives
        if ".func" not in d or d.startswith(".extern")
    ]
    self._declare(directives)
    yield f".target {self._assembly.target}"
    for directive in directives:
      yield self._rename(directive)
    for name, function in functions.items():
      yield from self._function(name, function)

  def _function(
      self, name: str, function: code_model.Function
  ) -> Iterator[str]:
    # Where modules were joined, names may occur again.
    self._symbols[function.name] = name
    self._declare(function.directives)
    labels = {name for _, name in function.labels}
    self._registers = {}
    self._labels = {}
    self._used_labels = labels.intersection(itertools.chain.from_iterable(
        map(
            self._names.findall,
            itertools.chain(
                (i.operands for i in function.instructions),
                function.directives,  # As the targets of `brx.idx`.
            ),
        )
    ))
    yield f"{name}:"
    for directive in function.directives:
      yield self._rename(directive)
    for name, numbers in sorted(function.attributes.items()):
      yield f".{name} {', '.join(map(str, numbers))}".rstrip()
    position = 0
    for index, instruction in enumerate(self._without_padding(function)):
      while position < len(function.labels) and (
          function.labels[position][0] <= index
      ):
        yield from self._label(function.labels[position][1])
        position += 1
      operands = self._rename(instruction.operands)
      predicate = self._rename(instruction.predicate)
      yield " ".join(filter(
          None,
          (predicate and f"@{predicate}", instruction.full_opcode, operands),
      ))
    for _, name in function.labels[position:]:
      yield from self._label(name)

  def _without_padding(
      self, function: code_model.Function
  ) -> Sequence[code_model.Instruction]:
    instructions = function.instructions
    end = len(instructions)
    while self._assembly.kind == "sass" and end and (
        instructions[end - 1].full_opcode == "NOP"
    ):
      end -= 1
    return instructions[:end]

  def _label(self, name: str) -> Iterator[str]:
    if name in self._used_labels:
      yield f"{self._name(name)}:"

  def _declare(self, directives: Sequence[str]) -> None:
    """Numbers the variables that are declared in one scope."""
    declared = set()
    for directive in filter(_VARIABLE.match, directives):
      for name in self._names.findall(directive.partition("=")[0]):
        if name not in declared:
          declared.add(name)
          self._symbols[name] = self._next("$S")

  def _rename(self, text: str) -> str:
    if not text:
      return ""
    if self._assembly.kind == "sass":
      text = text.replace(".reuse", "")
    text = re.sub(r" ?([,{}\[\]()|]) ?", r"\1", text).replace(",", ", ")
    return self._names.sub(lambda match: self._name(match[0]), text)

  def _name(self, name: str) -> str:
    if name in self._used_labels:
      if name not in self._labels:
        self._labels[name] = self._next("$L")
      return self._labels[name]
    if name[0] == "%" and _VIRTUAL_NAME.fullmatch(name):
      if name not in self._registers:
        self._registers[name] = self._next(name.rstrip("0123456789"))
      return self._registers[name]
    return self._symbols.get(name, name)

  def _next(self, prefix: str) -> str:
    number = self._counts.get(prefix, 0)
    self._counts[prefix] = number + 1
    return f"{prefix}{number}"


def _masked(line: str) -> str:
  """Returns a line without the numbers of what was renamed."""
  return _RENAMED.sub(lambda match: match[0].rstrip("0123456789") + "#", line)


def _named_alike(
    old: Sequence[str], new: Sequence[str], pairs: Sequence[tuple[int, int]]
) -> list[str]:
  """Returns `new` with the names that `old` has in the same places."""
  names: dict[str, str] = {}
  taken = set()
  for i, j in pairs:
    for theirs, ours in zip(_RENAMED.findall(old[i]), _RENAMED.findall(new[j])):
      if ours not in names and theirs not in taken:
        names[ours] = theirs
        taken.add(theirs)

  def name(match: re.Match[str]) -> str:
    ours = match[0]
    return names.get(ours) or (f"{ours}'" if ours in taken else ours)

  return [_RENAMED.sub(name, line) for line in new]


def _aligned(old: Sequence[str], new: Sequence[str]) -> list[tuple[int, int]]:
  """Returns which lines go together, by number, in ascending order."""
  start = 0
  end = min(len(old), len(new))
  while start < end and old[start] == new[start]:
    start += 1
  same_at_end = 0
  while same_at_end < end - start and (
      old[-1 - same_at_end] == new[-1 - same_at_end]
  ):
    same_at_end += 1
  middle = _shortest_edit(
      old[start : len(old) - same_at_end], new[start : len(new) - same_at_end]
  )
  return [
      *((i, i) for i in range(start)),
      *((start + i, start + j) for i, j in middle),
      *(
          (len(old) - k, len(new) - k) for k in range(same_at_end, 0, -1)
      ),
  ]


def _shortest_edit(
    old: Sequence[str], new: Sequence[str]
) -> list[tuple[int, int]]:
  """Returns the common lines of a shortest edit; none if that takes too long.

  This is the greedy algorithm of E. Myers, "An O(ND) difference algorithm and
  its variations": `ends[k]` is how far in `old` one gets with so many edits on
  the diagonal `k`, the lines of `old` minus those of `new` that are used up.
  """
  ends = {1: 0}
  history = []
  steps_left = _MAX_STEPS
  for edits in range(min(len(old) + len(new), _MAX_EDITS) + 1):
    history.append(ends.copy())
    for k in range(-edits, edits + 1, 2):
      i = _start(ends, k, edits)
      start = i
      while i < len(old) and i - k < len(new) and old[i] == new[i - k]:
        i += 1
      ends[k] = i
      steps_left -= i - start + 1
      if i >= len(old) and i - k >= len(new):
        return _walk_back(history, len(old), len(new))
      if steps_left < 0:
        return []
  return []


def _start(ends: dict[int, int], k: int, edits: int) -> int:
  """Returns where a diagonal is entered: by an insertion or a deletion."""
  if k == -edits or (k != edits and ends[k - 1] < ends[k + 1]):
    return ends[k + 1]
  return ends[k - 1] + 1


def _walk_back(
    history: Sequence[dict[int, int]], i: int, j: int
) -> list[tuple[int, int]]:
  pairs = []
  for edits in range(len(history) - 1, -1, -1):
    ends = history[edits]
    k = i - j
    inserted = k == -edits or (k != edits and ends[k - 1] < ends[k + 1])
    start = _start(ends, k, edits)
    while i > start:
      i, j = i - 1, j - 1
      pairs.append((i, j))
    i, j = (i, j - 1) if inserted else (i - 1, j)
  return pairs[::-1]


def _unified(
    old: Sequence[str], new: Sequence[str], pairs: Sequence[tuple[int, int]]
) -> tuple[str, ...]:
  """Writes the difference, with the lines of `pairs` side by side."""
  # Each with how many lines of both come before it.
  rows: list[tuple[str, int, int]] = []
  i = j = 0
  equal = [(x, y) for x, y in pairs if old[x] == new[y]]
  for x, y in [*equal, (len(old), len(new))]:
    rows += [(f"-{old[n]}", n, j) for n in range(i, x)]
    rows += [(f"+{new[n]}", x, n) for n in range(j, y)]
    i, j = x, y
    if x < len(old):
      rows.append((f" {old[x]}", i, j))
      i, j = i + 1, j + 1
  changes = [n for n, row in enumerate(rows) if row[0][0] != " "]
  if not changes:
    return ()
  lines = ["--- a", "+++ b"]
  first = changes[0]
  beyond = len(rows) + 2 * _CONTEXT
  for change, following in zip(changes, [*changes[1:], beyond]):
    if following - change > 2 * _CONTEXT:
      hunk = rows[max(first - _CONTEXT, 0) : change + _CONTEXT + 1]
      texts = [text for text, _, _ in hunk]
      lines.append(
          f"@@ -{hunk[0][1] + 1},{sum(t[0] != '+' for t in texts)}"
          f" +{hunk[0][2] + 1},{sum(t[0] != '-' for t in texts)} @@"
      )
      lines += texts
      first = following
  return tuple(lines)
