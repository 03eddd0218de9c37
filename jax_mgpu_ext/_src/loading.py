"""Imports other people's files and modules, and takes objects out of them."""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import importlib.util
import os
import sys
import traceback
from types import ModuleType
from typing import Any

from jax_mgpu_ext._src import texts
from jax_mgpu_ext._src.errors import UsageError


def load_object(source: str) -> Any:
  """Imports an object.

  Args:
    source: `package.module:object` or `file.py:object`; the object may be
      dotted.

  Raises:
    UsageError: There is no such thing, or importing it fails.
  """
  where, separator, name = source.rpartition(":")
  if "::" in source:
    raise UsageError(
        f"expected module:object or file.py:object, with one colon, got"
        f" {texts.shorten(source, 200)!r}"
    )
  if not separator or not is_dotted(name) or not where.rstrip(":"):
    raise UsageError(
        f"expected module:object or file.py:object, got {texts.shorten(source, 200)!r}"
    )
  try:
    if where.endswith(".py") or os.sep in where:
      if not os.path.isfile(where):
        raise UsageError(f"there is no file {where!r}")
      module = import_file(os.path.realpath(where))
    else:
      if not is_dotted(where):
        raise UsageError(f"{where!r} is neither a file nor the name of a module")
      with contextlib.suppress(OSError):  # There may be no such folder.
        append_path(os.getcwd())
      module = importlib.import_module(where)
  except (UsageError, KeyboardInterrupt):
    raise
  except BaseException as e:  # SystemExit, too. pylint: disable=broad-exception-caught
    if isinstance(e, ModuleNotFoundError) and e.name and (
        f"{where}.".startswith(f"{e.name}.")
    ):
      raise UsageError(f"there is no module {where!r}") from e
    raise UsageError(f"cannot import {where!r}: {describe(e)}") from e
  found = module
  for part in name.split("."):
    try:
      found = getattr(found, part)
    except AttributeError as e:
      raise UsageError(f"there is no {name!r} in {where!r}") from e
  return found


def is_dotted(name: str) -> bool:
  """Returns whether a text can be the name of a module."""
  return all(part.isidentifier() for part in name.split("."))


def import_file(path: str) -> ModuleType:
  """Imports a file, by the name that it has in its package if it is in one.

  Args:
    path: Absolute path without symbolic links.
  """
  folder, file = os.path.split(path)
  names, root = [file.removesuffix(".py")], folder
  while os.path.isfile(os.path.join(root, "__init__.py")):
    root, _, name = root.rpartition(os.sep)
    names.insert(0, name)
  append_path(root)
  dotted = ".".join(names)
  if len(names) > 1 and is_dotted(dotted):
    # Part of a package: its relative imports need the package's name.
    module = importlib.import_module(dotted)
    if os.path.realpath(module.__file__ or "") == path:
      return module
  # No name that another module could have, whatever the file is called.
  name = "_mgpu_check_" + "".join(
      c if c.isascii() and c.isalnum() else "_" for c in names[-1]
  )
  loader = importlib.machinery.SourceFileLoader(name, path)
  spec = importlib.util.spec_from_file_location(name, path, loader=loader)
  assert spec is not None
  module = importlib.util.module_from_spec(spec)
  sys.modules[name] = module
  loader.exec_module(module)
  return module


def append_path(folder: str) -> None:
  """Lets modules be imported from a folder, after all others."""
  if folder not in sys.path:
    sys.path.append(folder)


def describe(error: BaseException) -> str:
  """Puts an exception and the place it comes from into one line."""
  text = " ".join(texts.text_of(error).split())
  text = texts.shorten(text)
  if isinstance(error, SyntaxError):  # Its text has the place.
    return f"{type(error).__name__}: {text}"
  said = f"{type(error).__name__}: {text}" if text else type(error).__name__
  frames = [
      frame
      for frame in traceback.extract_tb(error.__traceback__)
      if not frame.filename.startswith("<frozen ")
      and frame.filename != importlib.__file__
      and os.path.dirname(frame.filename) != os.path.dirname(__file__)
  ]
  if not frames:
    return said
  return f"{said} ({frames[-1].filename}, line {frames[-1].lineno})"
