"""Every exception and warning of the package, each with a stable code.

A code is `MGPU` and three digits, and never changes its meaning. Its catalog
entry (`catalog/*.toml`, `mgpu-ext explain CODE`) says what it means and how to
mend it. Where JAX raises some exception type for the same mistake, our class
is an instance of that type too, so that no caller's `except` breaks.
"""

from __future__ import annotations

import functools
from typing import Any


def one_line(text: str, limit: int) -> str:
  """Writes a text of somebody else on one line, printable and shortened.

  Args:
    text: Any text; may hold line breaks and terminal escapes.
    limit: The largest number of characters.
  """
  # Cut first: what is not shown need not be looked at.
  text = " ".join(text[: 4 * limit].split())
  if not text.isprintable():
    text = "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode()
        for c in text
    )
  return text if len(text) <= limit else f"{text[:limit - 3]}..."


class SpecError(ValueError):
  """A spec, or a tree of specs, that Mosaic GPU cannot use.

  The text is "<problem> (at <path>). <hint> [<code>]"; the parts stay readable
  as attributes, and the path may be filled in later by whoever knows the tree.

  Attributes:
    code: The catalog code, as `MGPU012`.
    problem: What was expected and what was found.
    path: Where in the tree, as `scratch_types['ring'].full`, or None.
    spec: The offending object, or None.
    hint: What to write instead.
  """

  def __init__(
      self,
      problem: str,
      *,
      code: str,
      path: str | None = None,
      spec: Any = None,
      hint: str = "",
  ):
    # Not `super()`: in a class that is also one of somebody else's exceptions,
    # that might be a constructor with other arguments.
    ValueError.__init__(self, problem)
    self.code = code
    self.problem = problem
    self.path = path
    self.spec = spec
    self.hint = hint

  def __str__(self) -> str:
    text = one_line(self.problem, 800)
    if self.path:
      text += f" (at {one_line(self.path, 300)})"
    if self.hint:
      text += f". {one_line(self.hint, 800)}"
    return f"{text} [{self.code}]"

  def __reduce__(self):
    # The spec stays behind: it may hold arrays, tracers or lambdas, and an
    # error must always make it out of a worker process.
    return _rebuild, (type(self), self.problem, self.code, self.path, self.hint)


def _rebuild(cls, problem, code, path, hint):
  return cls(problem, code=code, path=path, hint=hint)


class NotASpecError(SpecError, AttributeError):
  """A leaf that is no spec at all: an array, a number, a ShapeDtypeStruct."""


class SpecTypeError(SpecError, TypeError):
  """A spec argument of the wrong type, or a class where an instance belongs."""


class NotAnArrayError(SpecError):
  """An array aval was asked of a spec that only describes a ref."""


class NoArrayMethodError(NotAnArrayError, AttributeError):
  """As `NotAnArrayError`, for specs that have no `get_array_aval` in JAX."""


class TransformedRefError(SpecError, AssertionError):
  """A transformed ref at a place that takes only plain ref avals."""


class MeshSizeError(SpecTypeError, AssertionError):
  """A size in a grid or cluster that is not an integer."""


class BarrierIndexError(SpecError, IndexError):
  """An index that is outside of a barrier array."""


class ClusterAxisError(SpecError, LookupError):
  """A collective axis that the kernel's cluster does not have."""


class RefUnionLeafError(SpecError, AttributeError):
  """A member of a `RefUnion` that is not a memory ref."""


class RefUnionMemorySpaceError(SpecError, NotImplementedError):
  """Members of a `RefUnion` that cannot share one memory."""


class TilingError(SpecError, AssertionError):
  """A tiling that does not divide, or does not fit, the shape of its ref."""


class RegistrationError(SpecError, TypeError):
  """A `register_spec` or `unregister_spec` call that cannot be honoured."""


class UsageError(Exception):
  """Something asked for that cannot be done at all; one line of text."""


class ConfigError(ValueError):
  """An environment variable of ours with a value that is not legal.

  Attributes:
    code: The catalog code, `MGPU090`.
  """

  code = "MGPU090"


class TargetError(ValueError):
  """A target that is not known, or a file of targets that cannot be used.

  Attributes:
    code: The catalog code, `MGPU100`.
    problem: The text without the code.
  """

  code = "MGPU100"

  def __init__(self, problem: str):
    super().__init__(problem)
    self.problem = problem

  def __str__(self) -> str:
    return f"{self.problem} [{self.code}]"


class AotUnavailableError(ImportError):
  """Something that compiling without a GPU needs is not installed.

  Attributes:
    code: The catalog code, `MGPU110`.
  """

  code = "MGPU110"

  def __str__(self) -> str:
    return f"{super().__str__()} [{self.code}]"


class NoKernelError(ValueError):
  """A function that was to be compiled calls no Mosaic GPU kernel.

  Attributes:
    code: The catalog code, `MGPU115`.
  """

  code = "MGPU115"

  def __str__(self) -> str:
    return f"{super().__str__()} [{self.code}]"


class CompileError(RuntimeError):
  """The compiler did not accept a kernel, or ended while compiling it.

  Attributes:
    code: The catalog code, `MGPU114`.
    target: Name of the target.
    output: The compiler's last words, several lines, maybe none.
  """

  code = "MGPU114"

  def __init__(self, problem: str, target: str = "", output: str = ""):
    super().__init__(problem, target, output)
    self.problem = problem
    self.target = target
    self.output = output

  def __str__(self) -> str:
    words = f"{self.problem} [{self.code}]"
    if self.output:
      words += f"\n{self.output}"
    return words


class CompilerCrashError(CompileError):
  """The compiler's process ended: an assertion of LLVM, a signal."""

  code = "MGPU111"


class CompileTimeoutError(CompileError, TimeoutError):
  """Compiling took longer than its time limit."""

  code = "MGPU112"


class CompileMemoryError(CompileError, MemoryError):
  """Compiling took more memory than its limit."""

  code = "MGPU113"


class DeadlockError(RuntimeError):
  """An interpreted kernel came to a state that it can never leave.

  Attributes:
    code: The catalog code, `DL001` to `DL009`.
    report: The whole report, a `deadlock.Report`; its text is `str(report)`.
  """

  def __init__(self, summary: str, report: Any = None):
    super().__init__(summary)
    self.report = report
    self.code = "" if report is None else report.code

  def __reduce__(self):
    return (type(self), (*self.args, self.report))


class HookRefusedError(RuntimeError):
  """A hook that was refused under `JAX_MGPU_EXT=strict`.

  Attributes:
    code: The catalog code, `MGPU091`.
  """

  code = "MGPU091"


class LateActivationWarning(RuntimeWarning):
  """Modules outside JAX still hold objects from before the activation."""


class CompileCacheWarning(RuntimeWarning):
  """Compiled kernels could not be kept on disk."""


class ForeignPatchWarning(RuntimeWarning):
  """Somebody replaced what we had replaced, so it was left alone on undo."""


def spec_error_like(upstream_type: type[BaseException]) -> type[SpecError]:
  """Returns a `SpecError` class that is also an `upstream_type`.

  For errors that JAX raises on its own while it derives an aval: the caller
  sees the one documented type, and an `except` for JAX's type still works.
  """
  if upstream_type.__module__ == "builtins":
    return _builtin_error_like(upstream_type)
  # Classes of others may come and go, and are not kept alive.
  return _make_error_like(upstream_type)


def _make_error_like(upstream_type: type[BaseException]) -> type[SpecError]:
  if issubclass(upstream_type, SpecError) or issubclass(
      SpecError, upstream_type
  ):
    return upstream_type if issubclass(upstream_type, SpecError) else SpecError
  try:
    return type("SpecError", (SpecError, upstream_type), {
        "__module__": __name__,
        "__doc__": f"A `SpecError` for a {upstream_type.__name__} of JAX.",
        "__reduce__": lambda self: (
            _rebuild_like,
            (upstream_type, self.problem, self.code, self.path, self.hint),
        ),
    })
  except TypeError:  # Two C layouts that do not go together.
    return SpecError


_builtin_error_like = functools.cache(_make_error_like)


def _rebuild_like(upstream_type, *parts):
  return _rebuild(spec_error_like(upstream_type), *parts)
