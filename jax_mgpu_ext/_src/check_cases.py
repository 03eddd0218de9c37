"""Kernel cases, how they are declared, and what checking one yields.

Nothing here imports JAX, so that a module may declare cases and stay cheap to
import, and so that the process that only shows results needs no JAX either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import inspect
import math
import operator
import sys
from typing import Any

from jax_mgpu_ext._src import targets as targets_lib
from jax_mgpu_ext._src import texts
from jax_mgpu_ext._src.errors import UsageError as UsageError

# Targets that a case can be for, beside those of files of one's own.
TARGETS = targets_lib.names()

# A stage's name, and who carries it out, as "module:function"; in the order in
# which a case goes through them. A further stage is a further line: its
# function takes a `KernelCase` and `Options`. It returns if the case passed,
# maybe with data; raises `StageSkipped` with the reason if it cannot be carried
# out here, and anything else if the case failed.
STAGES: dict[str, str] = {
    "specs": "jax_mgpu_ext._src.check_stages:specs",
    "budget": "jax_mgpu_ext._src.check_compile:budget",
    "interpret": "jax_mgpu_ext._src.check_stages:interpret",
    "compile": "jax_mgpu_ext._src.check_compile:compile_case",
}


class StageSkipped(Exception):
  """This machine, or this JAX, cannot carry out the stage; says why.

  Attributes:
    clean: Whether the process is as it was before; another case may use it.
  """

  def __init__(self, reason: str, *, clean: bool = True):
    super().__init__(reason)
    self.clean = clean


class StageFailed(Exception):
  """The case failed the stage.

  Attributes:
    message: One line that says what is wrong.
    details: More lines, for the report.
    data: What was found out all the same.
  """

  def __init__(
      self, message: str, details: str = "", data: dict[str, Any] | None = None
  ):
    super().__init__(message)
    self.message = message
    self.details = details
    self.data = data or {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageResult:
  """What one stage said about one case.

  Attributes:
    stage: Name of the stage, a key of `STAGES`.
    state: "passed", "failed" or "skipped".
    seconds: How long it took.
    message: One line: what is wrong, or why it was skipped.
    details: More lines: a traceback, what the case printed.
    data: What the stage found out, as plain data: target -> numbers.
  """

  stage: str
  state: str
  seconds: float = 0.0
  message: str = ""
  details: str = ""
  data: dict[str, Any] = dataclasses.field(default_factory=dict)

  def to_json(self) -> dict[str, Any]:
    return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaseResult:
  """What all stages said about one case.

  Attributes:
    name: The case's name, with its parameter, as `ring[2_stages]`.
    selector: What to give to `mgpu-ext check` to run only this case.
    targets: Devices the case is for.
    stages: One result for each stage, in their order.
  """

  name: str
  selector: str
  targets: tuple[str, ...]
  stages: tuple[StageResult, ...]

  @property
  def ok(self) -> bool:
    """Whether no stage failed; skipped ones do not count."""
    return all(stage.state != "failed" for stage in self.stages)

  def to_json(self) -> dict[str, Any]:
    return {
        "name": self.name,
        "selector": self.selector,
        "targets": list(self.targets),
        "ok": self.ok,
        "stages": [stage.to_json() for stage in self.stages],
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelCase:
  """A kernel factory with all that is needed to check it; see `kernel_case`.

  Attributes:
    base_name: The name without the parameter.
    name: The name with it; the same if there is none.
    modules: Names of the modules the case belongs to.
    line: Where it was declared.
    params: What the factory, `inputs`, `reference` and `specs` are called with.
  """

  base_name: str
  name: str
  factory: Callable[..., Callable[..., Any]]
  inputs: Callable[..., Sequence[Any]]
  reference: Callable[..., Any]
  targets: tuple[str, ...]
  rtol: float
  atol: float
  detect_races: bool
  timeout_s: float
  specs: Any
  params: Mapping[str, Any]
  modules: frozenset[str]
  line: int

  def make_kernel(self, interpret: Any = None) -> Callable[..., Any]:
    """Returns a fresh kernel, for the GPU or for the interpreter."""
    return self.factory(interpret=interpret, **self.params)

  def make_inputs(self, rng: Any) -> tuple[Any, ...]:
    """Returns the arguments of the kernel.

    Raises:
      StageFailed: `inputs` returned one array, whose rows would be taken for
        arguments, or something that is no sequence.
    """
    inputs = self._call(self.inputs, rng)
    if not isinstance(inputs, (tuple, list)):
      raise StageFailed(
          "inputs must return a tuple of the kernel's arguments, got"
          f" {type(inputs).__name__}: write (x,) for one"
      )
    return tuple(inputs)

  def make_reference(self, *inputs: Any) -> Any:
    return self._call(self.reference, *inputs)

  def make_specs(self) -> Any:
    """Returns the tree of specs of the case, or None."""
    return self._call(self.specs) if callable(self.specs) else self.specs

  def _call(self, function: Callable[..., Any], *args: Any) -> Any:
    """Calls with those of the parameters that the function takes."""
    try:
      taken = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # A builtin without a signature.
      return function(*args)
    if any(p.kind is p.VAR_KEYWORD for p in taken):
      return function(*args, **self.params)
    names = {
        p.name
        for p in list(taken)[len(args) :]
        if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)
    }
    return function(
        *args, **{k: v for k, v in self.params.items() if k in names}
    )


def number(key: str, value: Any, *, positive: bool = False) -> float:
  """Returns the value of an argument that is a number, as a plain one.

  Args:
    key: The argument's name.
    value: A number of Python or NumPy, or of a type that NumPy knows.
    positive: Whether zero is not legal.

  Raises:
    ValueError: If it is something else, negative, infinite or too large.
  """
  kind = getattr(getattr(value, "dtype", None), "kind", "f")
  if (
      hasattr(type(value), "__float__")
      and not isinstance(value, (bool, str, bytes))
      and kind not in "bcOSUmM"
      and getattr(value, "shape", ()) == ()
  ):
    try:
      plain = float(value)
    except Exception:  # An integer above all floats, a tracer. pylint: disable=broad-exception-caught
      plain = math.nan
    if 0 <= plain < math.inf and (plain or not positive):
      return plain
  raise ValueError(
      f"Expected a positive number, got {key}={texts.shorten(_repr(value), 200)}"
  )


def count(value: Any) -> int | None:
  """Returns a whole number as an int of Python, None if it is no such thing."""
  try:
    return None if isinstance(value, bool) else operator.index(value)
  except TypeError:
    return None


def _repr(value: Any) -> str:
  try:
    return repr(value)
  except Exception as own:  # An int of 5000 digits. pylint: disable=broad-exception-caught
    return f"a value of type {type(value).__name__} ({type(own).__name__})"


# Every case declared in this process, in order.
declared: list[KernelCase] = []

# Whether this process is one that imports and checks cases for another.
in_worker = False


def kernel_case(
    *,
    inputs: Callable[..., Sequence[Any]],
    reference: Callable[..., Any],
    targets: Sequence[str] = ("h100",),
    name: str | None = None,
    rtol: float = 0,
    atol: float = 0,
    detect_races: bool = True,
    timeout_s: float = 60,
    specs: Any = None,
    params: Mapping[str, Mapping[str, Any]] | None = None,
) -> Callable[[Any], Any]:
  """Declares a case for `mgpu-ext check`, as a decorator of a kernel factory.

  The factory is called as `factory(interpret=...)`, several times, and returns
  a new callable each time, which takes the inputs and returns what the
  reference returns. `interpret` goes to `plgpu.kernel` as it is.

  Args:
    inputs: Called with a `numpy.random.Generator`, returns the sequence of the
      kernel's arguments.
    reference: Called with the arguments, returns what the kernel must: a tree
      of arrays of the same shapes and kinds of type.
    targets: What the kernel is for: names of `TARGETS`, or `file.toml::name`.
    name: The case's name; default: that of the factory.
    rtol: Relative tolerance; default: none.
    atol: Absolute tolerance; default: none, so values must be equal.
    detect_races: Whether a race fails the case.
    timeout_s: Time limit for all stages of the case, in seconds.
    specs: The kernel's scratch types, a tree of specs or a function that
      returns one, to be asked for their avals.
    params: Makes one case of each entry, `name[key]`. An entry's value holds
      keyword arguments for the factory; `inputs`, `reference` and a callable
      `specs` get those of them that they take.

  Returns:
    A decorator that returns the factory unchanged.

  Raises:
    TypeError: If something that is called is not callable, or if a factory
      without a name of its own gets none here.
    ValueError: If another argument is not legal.
  """
  for key, value in dict(inputs=inputs, reference=reference).items():
    if not callable(value):
      raise TypeError(f"Expected a function, got {key}={value!r}")
  try:
    targets = (targets,) if isinstance(targets, str) else tuple(targets)
    legal = bool(targets) and all(isinstance(t, str) for t in targets)
  except (TypeError, ValueError):  # No sequence, or one of arrays.
    legal = False
  if not legal:
    raise ValueError(
        f"Expected targets of {', '.join(TARGETS)}, got {targets=}"
    )
  for target in targets:
    targets_lib.get(target)
  rtol, atol = number("rtol", rtol), number("atol", atol)
  timeout_s = number("timeout_s", timeout_s, positive=True)
  if params is None:
    named_params = {"": {}}
  elif (
      isinstance(params, Mapping)
      and params
      and all(isinstance(value, Mapping) for value in params.values())
  ):
    named_params = {f"[{key}]": dict(value) for key, value in params.items()}
  else:
    raise ValueError(f"Expected a mapping of names to arguments, got {params=}")
  frame = sys._getframe(1)
  declaring_module, line = frame.f_globals.get("__name__", ""), frame.f_lineno

  def declare(factory):
    if not callable(factory):
      raise TypeError(f"Expected a kernel factory, got {factory!r}")
    base_name = name if name is not None else getattr(factory, "__name__", None)
    if base_name is None:
      raise TypeError(f"{factory!r} has no name, pass name=")
    if not isinstance(base_name, str):
      raise ValueError(
          f"Expected a printable name without '::', got {base_name!r}"
      )
    for suffix, arguments in named_params.items():
      full_name = base_name + suffix
      if not base_name or "::" in full_name or not full_name.isprintable():
        raise ValueError(
            f"Expected a printable name without '::', got {full_name!r}"
        )
      declared.append(
          KernelCase(
              base_name=base_name,
              name=full_name,
              factory=factory,
              inputs=inputs,
              reference=reference,
              targets=targets,
              rtol=rtol,
              atol=atol,
              detect_races=detect_races,
              timeout_s=timeout_s,
              specs=specs,
              params=arguments,
              modules=frozenset(
                  {declaring_module, getattr(factory, "__module__", "")}
              ),
              line=line,
          )
      )
    return factory

  return declare
