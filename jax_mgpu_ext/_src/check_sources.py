"""From a selector to the cases it stands for.

`parse` runs in the process that was asked, and looks only at the file system;
`load` runs in a child process, since it imports what may be anybody's code.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import dataclasses
import importlib
import os
import pkgutil
from types import ModuleType

from jax_mgpu_ext._src import check_cases
from jax_mgpu_ext._src import loading
from jax_mgpu_ext._src.check_cases import KernelCase
from jax_mgpu_ext._src.check_cases import UsageError

SHIPPED = "jax_mgpu_ext.kernels"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
  """A file or a module that declares cases.

  Attributes:
    kind: "file" or "module".
    target: Absolute path of the file, or name of the module.
    shown: The same, in the words of whoever asked for it.
  """

  kind: str
  target: str
  shown: str = dataclasses.field(compare=False)


def parse(selector: str) -> tuple[Source, str | None]:
  """Takes a selector apart.

  Args:
    selector: `file.py`, `file.py::case`, `package.module`, or
      `package.module::case`; the case with or without its parameter.

  Returns:
    The source, and the name of the case or None for all.

  Raises:
    UsageError: If there is no such file, or if it can be no selector.
  """
  head, case = _split(selector)
  if case == "" or not head:
    raise UsageError(
        f"{selector!r} is no selector: expected FILE.py, FILE.py::CASE, MODULE"
        " or MODULE::CASE"
    )
  if os.path.isdir(head) and (os.sep in head or not loading.is_dotted(head)):
    raise UsageError(
        f"{head!r} is a folder: expected a Python file or a module"
    )
  if os.path.isfile(head) or head.endswith(".py") or os.sep in head:
    if not os.path.isfile(head):
      raise UsageError(f"there is no file {head!r}")
    if not head.endswith(".py"):
      raise UsageError(f"{head!r} is no Python file: expected a name in .py")
    try:
      target = os.path.realpath(head)
    except OSError as e:  # Without a current folder there is no such path.
      raise UsageError(
          f"cannot tell where {head!r} is: the current folder is gone"
          f" ({e.strerror})"
      ) from e
    return Source(kind="file", target=target, shown=head), case
  if not loading.is_dotted(head):
    path, colon, name = head.rpartition(":")
    hint = f": write {path}::{name}" if colon and path and name else ""
    raise UsageError(
        f"{head!r} is neither a file nor the name of a module{hint}"
    )
  return Source(kind="module", target=head, shown=head), case


def _split(selector: str) -> tuple[str, str | None]:
  """Splits at the `::` that ends a file's name, else at the first one."""
  parts = selector.split("::")
  for count in range(len(parts), 0, -1):
    head = "::".join(parts[:count])
    if os.path.isfile(head):
      return head, "::".join(parts[count:]) if count < len(parts) else None
  return parts[0], "::".join(parts[1:]) if len(parts) > 1 else None


def load(source: Source) -> list[tuple[str, KernelCase]]:
  """Imports a source, and returns its cases.

  Args:
    source: What to import. A package stands for all of its modules.

  Returns:
    Pairs of the module's name and a case, in the order of declaration.

  Raises:
    UsageError: If it cannot be imported, or two cases have one name.
  """
  modules = []
  try:
    modules.extend(
        [loading.import_file(source.target)]
        if source.kind == "file"
        else _import_modules(source.target)
    )
  except BaseException as error:  # pylint: disable=broad-exception-caught
    if (
        isinstance(error, ModuleNotFoundError)
        and source.kind == "module"
        and error.name is not None
        and f"{source.target}.".startswith(f"{error.name}.")
    ):
      raise UsageError(f"there is no module {source.shown!r}") from error
    raise UsageError(
        f"cannot import {source.shown!r}: {loading.describe(error)}"
    ) from error
  found = []
  for module in modules:
    lines: dict[str, int] = {}
    for case in check_cases.declared:
      if module.__name__ not in case.modules:
        continue
      if any(case is other for _, other in found):
        continue
      if case.name in lines:
        raise UsageError(
            f"{source.shown!r} declares two cases {case.name!r}, in lines"
            f" {lines[case.name]} and {case.line}: give one another name="
        )
      lines[case.name] = case.line
      found.append((module.__name__, case))
  return found


def _import_modules(name: str) -> Iterator[ModuleType]:
  # Last, so that a file in the current folder hides nothing that JAX needs.
  with contextlib.suppress(OSError):  # There may be no such folder any more.
    loading.append_path(os.getcwd())
  module = importlib.import_module(name)
  yield module
  if hasattr(module, "__path__"):
    for info in pkgutil.walk_packages(module.__path__, name + ".", _raise):
      # Running `package.__main__` is not what an import should do.
      if info.name.rpartition(".")[2] != "__main__":
        yield importlib.import_module(info.name)


def _raise(unused_name: str):
  raise  # pylint: disable=misplaced-bare-raise
