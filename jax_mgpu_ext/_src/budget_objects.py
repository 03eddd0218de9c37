"""From what `mgpu-ext budget` is given to the specs that it stands for."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from jax_mgpu_ext._src import check_sources
from jax_mgpu_ext._src import kernel_calls
from jax_mgpu_ext._src import loading
from jax_mgpu_ext._src.check_cases import KernelCase
from jax_mgpu_ext._src.errors import UsageError


def load(selector: str) -> Any:
  """Imports what a selector names, and returns the tree of specs.

  Args:
    selector: `module:object` or `file.py:object`, for a tree of specs or a
      function that returns one without arguments.

  Raises:
    UsageError: There is no such thing, or the code of its owner failed.
  """
  try:
    found = loading.load_object(selector)
  except UsageError as e:
    _let_pass(e.__cause__)
    raise
  # Specs may be callable, as the members of `plgpu.SemaphoreType`.
  if not inspect.isroutine(found) and not isinstance(found, functools.partial):
    return found
  if required := _required_arguments(found):
    raise UsageError(
        f"{selector!r} needs arguments, {', '.join(required)}: give them"
        " defaults, or name a function without any"
    )
  return _call(found, selector)


def _required_arguments(function: Any) -> list[str]:
  try:
    parameters = inspect.signature(function).parameters.values()
  except (TypeError, ValueError):  # A builtin without a signature.
    return []
  return [
      p.name
      for p in parameters
      if p.default is p.empty
      and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
  ]


def kernels(selector: str) -> list[kernel_calls.KernelCall]:
  """Imports a case, and returns the kernels that it calls.

  Args:
    selector: `file.py::case` or `module::case`.

  Raises:
    UsageError: There is no such case, it calls no kernel, or its code failed.
  """
  from jax_mgpu_ext._src import check_stages  # pylint: disable=g-import-not-at-top

  try:
    case = _case(selector)
  except UsageError as e:
    _let_pass(e.__cause__)
    raise

  def trace():
    import jax  # pylint: disable=g-import-not-at-top

    kernel = check_stages.make_kernel(case, None)
    return jax.jit(kernel).trace(*check_stages.make_inputs(case))

  found = list(kernel_calls.find(_call(trace, selector).jaxpr))
  if not found:
    raise UsageError(
        f"the case {case.name!r} calls no plgpu.kernel, whose budget could be told"
    )
  return found


def _case(selector: str) -> KernelCase:
  source, name = check_sources.parse(selector)
  cases = [case for _, case in check_sources.load(source)]
  chosen = [case for case in cases if case.name == name]
  chosen = chosen or [case for case in cases if case.base_name == name]
  if len(chosen) != 1:
    names = ", ".join(case.name for case in chosen or cases) or "none"
    raise UsageError(
        f"expected one case of {source.shown!r}, got {name!r}; there are:"
        f" {names}"
    )
  return chosen[0]


def _call(function: Any, shown: str) -> Any:
  try:
    return function()
  except BaseException as e:  # SystemExit, too. pylint: disable=broad-exception-caught
    _let_pass(e)
    raise UsageError(f"{shown!r} failed: {loading.describe(e)}") from e


def _let_pass(error: BaseException | None) -> None:
  """Raises what ends the process: Ctrl-C, a signal."""
  if error is not None and not isinstance(error, (Exception, SystemExit)):
    raise error
