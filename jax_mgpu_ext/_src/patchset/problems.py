"""What can be wrong with a patch series, as an exception and as data."""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import functools
import shutil
from typing import Any


class PatchError(Exception):
  """Input that the patch tool cannot use; the text is one line for a person.

  Whoever raises it has changed nothing.
  """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
  """One thing that `check` has found.

  Attributes:
    release: The folder of the release, as `jax-0.12.0`.
    file: The file in that folder, empty if it is about the folder.
    text: What is wrong, and where.
  """

  release: str
  file: str = ""
  text: str

  def __str__(self) -> str:
    place = f"{self.release}/{self.file}" if self.file else self.release
    return f"{place}: {self.text}"


def os_reason(error: OSError) -> str:
  """Returns why the system refused; of many files, for the first one only."""
  if isinstance(error, shutil.Error) and error.args:
    entries = error.args[0]
    if isinstance(entries, list) and entries:
      return str(entries[0][-1])  # Source, target, reason.
  return error.strerror or str(error)


def reports_os_errors(function: Callable[..., Any]) -> Callable[..., Any]:
  """Makes a function raise `PatchError` where a file or folder will not do."""

  @functools.wraps(function)
  def wrapper(*args, **kwargs):
    try:
      return function(*args, **kwargs)
    except OSError as e:
      place = f"{e.filename}: " if e.filename else ""
      raise PatchError(f"{place}{os_reason(e)}") from e

  return wrapper
