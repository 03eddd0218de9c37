"""Code of kernels, PTX or SASS: read it, count it, compare it, test it.

Imports no JAX, and needs no tool of CUDA.
"""

from __future__ import annotations

import difflib
import itertools
import re
from typing import Any

from jax_mgpu_ext._src.aot import code_diff
from jax_mgpu_ext._src.aot import code_model
from jax_mgpu_ext._src.aot import opcode_classes
from jax_mgpu_ext._src.aot import ptx
from jax_mgpu_ext._src.aot import sass

Assembly = code_model.Assembly
AssemblyError = code_model.AssemblyError
Function = code_model.Function
Instruction = code_model.Instruction
SourceLine = code_model.SourceLine
OPCODE_CLASSES = opcode_classes.OPCODE_CLASSES
normal_form = code_diff.normal_form
parse_ptx = ptx.parse_ptx
parse_sass = sass.parse_sass

_IS_PTX = re.compile(r"^[ \t]*\.version\b", re.MULTILINE)
# How much of a difference, and of an opcode, is shown.
_MAX_DIFF_LINES = 40
_MAX_OPCODE = 80


def diff(a: Any, b: Any) -> tuple[str, ...]:
  """Returns the lines of a unified diff of the normal forms of two kernels.

  Args:
    a: An `Assembly`, its text (PTX or SASS), or an object with PTX as `.ptx`,
      such as a compiled kernel.
    b: The same, of the same kind.

  Returns:
    The lines, without line ends; none only if the normal forms are equal.

  Raises:
    AssemblyError: If a text cannot be read.
    TypeError: If an argument is none of these.
    ValueError: If one is PTX and the other SASS.
  """
  old, new = _assembly(a, ("ptx",)), _assembly(b, ("ptx",))
  if old.kind != new.kind:
    raise ValueError(
        "expected both as PTX or both as SASS, got"
        f" {old.kind.upper()} and {new.kind.upper()}"
    )
  return code_diff.diff(old, new)


def assert_same_code(a: Any, b: Any) -> None:
  """Fails unless two kernels have the same normal form.

  Args:
    a: An `Assembly`, its text (PTX or SASS), or an object with PTX as `.ptx`,
      such as a compiled kernel.
    b: The same, of the same kind.

  Raises:
    AssertionError: If they differ; says where.
    AssemblyError: If a text cannot be read.
    TypeError: If an argument is none of these.
    ValueError: If one is PTX and the other SASS.
  """
  lines = diff(a, b)
  if not lines:
    return
  shown = lines[:_MAX_DIFF_LINES]
  left_out = len(lines) - len(shown)
  text = "\n".join(shown)
  if left_out:
    text += f"\n({left_out} more line{'s' * (left_out > 1)})"
  removed, added = (
      sum(line[0] == sign for line in lines[2:]) for sign in "-+"
  )
  raise AssertionError(
      f"expected the same code, got {removed} lines less and {added} more:\n"
      + text
  )


def assert_contains(
    kernel: Any, pattern: str, *, count: int | None = None
) -> None:
  """Fails unless a kernel has an instruction that a pattern matches.

  Args:
    kernel: An `Assembly`, its text (PTX or SASS), or an object with SASS as
      `.sass` or, if that is empty or missing, PTX as `.ptx`.
    pattern: A regular expression, looked for anywhere in `Instruction.text`:
      the opcode, its modifiers and its operands, as `UTMALDG.*MULTICAST`.
    count: How many instructions must match; None for at least one.

  Raises:
    AssertionError: If none, or another number, matches.
    AssemblyError: If a text cannot be read.
    TypeError: If `kernel` is none of these.
    ValueError: If the pattern is no regular expression, or `count` no number.
  """
  compiled = _compiled(pattern)
  if count is not None and (type(count) is not int or count < 0):
    raise ValueError(f"expected count as an integer from 0, got {count!r}")
  assembly = _assembly(kernel, ("sass", "ptx"))
  found = [i.text for i in assembly.instructions() if compiled.search(i.text)]
  if len(found) == count or (count is None and found):
    return
  expected = "an instruction that matches" if count is None else (
      f"{count} instruction{'s' * (count != 1)} matching"
  )
  raise AssertionError(
      f"expected {expected} {pattern!r} in the {_described(assembly)},"
      f" got {_listed(found)}"
      + (f"; nearest opcodes: {near}" if (near := _nearest(assembly, pattern))
         else "")
  )


def assert_lacks(kernel: Any, pattern: str) -> None:
  """Fails if a kernel has an instruction that a pattern matches.

  Args:
    kernel: As for `assert_contains`.
    pattern: As for `assert_contains`.

  Raises:
    AssertionError: If there is one.
    AssemblyError: If a text cannot be read.
    TypeError: If `kernel` is none of these.
    ValueError: If the pattern is no regular expression.
  """
  compiled = _compiled(pattern)
  assembly = _assembly(kernel, ("sass", "ptx"))
  found = [i.text for i in assembly.instructions() if compiled.search(i.text)]
  if found:
    raise AssertionError(
        f"expected no instruction that matches {pattern!r} in the"
        f" {_described(assembly)}, got {_listed(found)}"
    )


def _assembly(kernel: Any, attributes: tuple[str, ...]) -> Assembly:
  """Returns the code of what an assertion was given.

  Args:
    kernel: An `Assembly`, a text, or an object with either.
    attributes: Where an object may have it; the first that is not empty counts.
  """
  if isinstance(kernel, Assembly):
    return kernel
  if isinstance(kernel, str):
    return (parse_ptx if _IS_PTX.search(kernel) else parse_sass)(kernel)
  for name in attributes:
    value = getattr(kernel, name, None)
    if isinstance(value, Assembly):
      return value
    if isinstance(value, str) and value:
      return (parse_ptx if name == "ptx" else parse_sass)(value)
  raise TypeError(
      "expected an Assembly, a PTX or SASS text, or an object with one as"
      f" {' or '.join(f'.{name}' for name in attributes)}, got"
      f" {type(kernel).__name__}; compile the kernel first"
  )


def _compiled(pattern: str) -> re.Pattern[str]:
  if not isinstance(pattern, str) or not pattern:
    raise ValueError(
        f"expected a regular expression that is not empty, got {pattern!r}"
    )
  try:
    return re.compile(pattern)
  except (re.error, OverflowError, RecursionError) as error:
    raise ValueError(
        f"expected a regular expression, got {pattern!r}: {error}; write a"
        " backslash before a character such as '[' to look for itself"
    ) from None


def _described(assembly: Assembly) -> str:
  number = sum(1 for _ in assembly.instructions())
  return (
      f"{assembly.kind.upper()} for {assembly.target or 'an unknown target'}"
      f" ({number} instruction{'s' * (number != 1)})"
  )


def _listed(found: list[str]) -> str:
  if not found:
    return "none"
  shown = "; ".join(text[:_MAX_OPCODE] for text in found[:3])
  return f"{len(found)}: {shown}{'; ...' * (len(found) > 3)}"


def _nearest(assembly: Assembly, pattern: str) -> str:
  """Returns the opcodes that look most like a pattern, joined by commas."""
  opcodes = [name[:_MAX_OPCODE] for name in itertools.islice(
      assembly.opcode_counts(), 1000
  )]
  words = " ".join(re.findall(r"[\w.:]+", pattern[:_MAX_OPCODE]))
  return ", ".join(difflib.get_close_matches(words, opcodes, n=3, cutoff=0.3))
