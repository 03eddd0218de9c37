"""Finds packages, extras and CUDA programs, and their versions."""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
import glob
from importlib import metadata
from importlib import util
import os
import re
import shutil

from jax_mgpu_ext._src import programs
from jax_mgpu_ext._src import releases

DISTRIBUTION = "jax-mgpu-ext"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Package:
  """A distribution that matters here.

  Attributes:
    name: Its name on PyPI.
    version: The version installed, None if it is not.
    note: What is to be said about that version.
  """

  name: str
  version: str | None
  note: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Extra:
  """An extra of this package.

  Attributes:
    name: As in `pip install jax-mgpu-ext[name]`.
    missing: Distributions that it asks for and that are not installed.
  """

  name: str
  missing: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tool:
  """A program of the CUDA toolkit.

  Attributes:
    name: `ptxas`, `nvdisasm` or `nvcc`.
    path: Where it is, None if it was not found.
    version: Its version, as `13.0.48`, empty if it does not say.
  """

  name: str
  path: str | None
  version: str = ""


def version(name: str) -> str | None:
  """Returns the version of a distribution, None if it is not installed."""
  try:
    return metadata.version(name)
  except metadata.PackageNotFoundError:
    return None


def package(name: str) -> Package:
  """Returns what there is of a distribution."""
  found = version(name)
  note = ""
  if name == "jax" and found:
    same = releases.canonical(found)
    if same not in releases.SUPPORTED:
      note = f"not one of {', '.join(releases.SUPPORTED)}"
    else:
      note = "supported" if same == found else f"supported, same as {same}"
  return Package(name=name, version=found, note=note)


def extras() -> Iterator[Extra]:
  """Yields this package's extras; none where it runs from its sources."""
  try:
    names = metadata.metadata(DISTRIBUTION).get_all("Provides-Extra") or ()
  except metadata.PackageNotFoundError:
    return
  for name in names:
    missing = dict.fromkeys(_missing(DISTRIBUTION, name))
    yield Extra(name=name, missing=tuple(missing))


def _missing(distribution: str, extra: str) -> Iterator[str]:
  """Yields what an extra asks for, through other packages' extras, in vain."""
  for requirement in metadata.requires(distribution) or ():
    what, _, marker = requirement.partition(";")
    if not re.search(rf"extra\s*==\s*['\"]{re.escape(extra)}['\"]", marker):
      continue
    name, inner = re.match(r"\s*([\w.-]+)\s*(?:\[([^]]*)\])?", what).groups()
    if version(name) is None:
      yield name
    else:
      for inner_extra in (inner or "").split(","):
        if inner_extra.strip():
          yield from _missing(name, inner_extra.strip())


def find_tool(name: str) -> Iterator[Tool]:
  """Yields every copy of a program: of PyPI, of CUDA, and on PATH."""
  path = None
  for path in tool_paths(name):
    output = programs.output_of([path, "--version"])
    match = re.search(r"\bV(\d+(?:\.\d+)+)", output)
    yield Tool(name=name, path=path, version=match[1] if match else "")
  if path is None:
    yield Tool(name=name, path=None)


def tool_paths(name: str) -> list[str]:
  """Returns where a program is, each copy once, the likeliest first."""
  spec = util.find_spec("nvidia")
  folders = list(spec.submodule_search_locations or ()) if spec else []
  paths = [p for f in folders for p in sorted(glob.glob(f"{f}/*/bin/{name}"))]
  for variable in ("CUDA_ROOT", "CUDA_HOME", "CUDA_PATH"):
    if folder := os.environ.get(variable):
      paths.append(os.path.join(folder, "bin", name))
  paths.append(f"/usr/local/cuda/bin/{name}")  # Where Mosaic looks too.
  if on_path := shutil.which(name):
    paths.append(on_path)
  found = {os.path.realpath(p): p for p in paths if os.access(p, os.X_OK)}
  return list(found.values())
