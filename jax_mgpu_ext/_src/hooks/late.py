"""Warns of what a change of state could not reach."""

from __future__ import annotations

import sys
import types
from typing import Any
import warnings

from jax_mgpu_ext._src import errors

_PACKAGE = __name__.partition(".")[0]


def warn_of_foreign(names: list[str]) -> None:
  """Names what somebody else has replaced after us, and so was left alone."""
  if names:
    _warn(
        "Left as they are, since other code has replaced them after"
        f" jax_mgpu_ext did: {', '.join(dict.fromkeys(names))}. Undo that"
        " replacement, then call deactivate() again [MGPU093]",
        errors.ForeignPatchWarning,
    )


def warn_of_stale(replaced: list[tuple[Any, Any]], verb: str) -> None:
  """Names the modules that bound an object before it was replaced.

  Args:
    replaced: Pairs (old, new) of what was replaced.
    verb: What was done, as `activated`.
  """
  functions = {
      id(old)
      for old, _ in replaced
      if isinstance(old, types.FunctionType)
  }
  if not functions:
    return
  holders = []
  for module_name, module in sys.modules.copy().items():
    if not isinstance(module, types.ModuleType):
      continue
    if str(module_name).startswith(f"{_PACKAGE}."):
      continue
    for name, value in list(vars(module).items()):
      if id(value) in functions:
        holders.append(f"{module_name}.{name}")
  if holders:
    _warn(
        f"jax_mgpu_ext was {verb} after these names were bound, and they still"
        f" hold the old objects: {', '.join(sorted(holders))}. Import"
        " jax_mgpu_ext before the modules that use Pallas [MGPU092]",
        errors.LateActivationWarning,
    )


def _warn(text: str, category: type[Warning]) -> None:
  """Warns in the name of the line that imported or called us."""
  frame = sys._getframe()  # pylint: disable=protected-access
  while frame.f_back is not None and _is_ours(frame):
    frame = frame.f_back
  warnings.warn_explicit(
      text,
      category,
      frame.f_code.co_filename,
      frame.f_lineno,
      module=str(frame.f_globals.get("__name__", "")),
      registry=frame.f_globals.setdefault("__warningregistry__", {}),
  )


def _is_ours(frame: types.FrameType) -> bool:
  name = str(frame.f_globals.get("__name__", ""))
  return name.partition(".")[0] in (_PACKAGE, "importlib", "contextlib")
