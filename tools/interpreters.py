"""Finds the Pythons of this machine for `tools/environments.py`."""

from __future__ import annotations

import dataclasses
import functools
import glob
import json
import os
import subprocess

# `venv` of a virtual environment makes links to the Python that it came from;
# so name that one, since the virtual environment may be the one to replace.
_PROBE = """
import ensurepip, json, sys, venv
print(json.dumps({
    "path": getattr(sys, "_base_executable", None) or sys.executable,
    "version": "%d.%d.%d" % sys.version_info[:3],
}))
"""


class UserError(Exception):
  """Something that a person must mend; the text says what, and how."""


@dataclasses.dataclass(frozen=True)
class Interpreter:
  """A Python that can make virtual environments.

  Attributes:
    path: Its executable, never one of a virtual environment.
    version: Its version, as `3.12.1`.
  """

  path: str
  version: str


def minor(version: str) -> tuple[int, ...]:
  """Returns a version as `(3, 12)`."""
  return tuple(int(part) for part in version.split(".")[:2])


def clean_environ() -> dict[str, str]:
  """Returns the process' environment less what leaks into another Python."""
  leaks = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")
  return {k: v for k, v in os.environ.items() if k not in leaks}


@functools.lru_cache(maxsize=None)
def probe(command: str) -> Interpreter | None:
  """Returns what a command is, or None if it is no Python that will do."""
  try:
    done = subprocess.run(
        [command, "-c", _PROBE],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
        check=True,
        env=clean_environ(),
    )
    return Interpreter(**json.loads(done.stdout))
  except (OSError, ValueError, subprocess.SubprocessError):
    return None


def candidates(version: str) -> list[str]:
  """Returns the files that may be Python `version`: PATH, pyenv, then uv."""
  # All of PATH, not its first hit only: pyenv's shims stand in front of what
  # they do not know.
  folders = os.environ.get("PATH", "").split(os.pathsep)
  names = (f"python{version}", "python3", "python")
  paths = [os.path.join(f, name) for name in names for f in folders if f]
  pyenv = os.environ.get("PYENV_ROOT") or os.path.expanduser("~/.pyenv")
  data = os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")
  for pattern in (
      f"{pyenv}/versions/{version}*/bin/python{version}",
      f"{data}/uv/python/cpython-{version}*/bin/python{version}",
  ):
    paths += sorted(glob.glob(pattern), reverse=True)
  found = [p for p in paths if os.path.isfile(p) and os.access(p, os.X_OK)]
  return list(dict.fromkeys(found))


@functools.lru_cache(maxsize=None)
def find(version: str) -> Interpreter | None:
  """Returns an interpreter of a version, as `3.12`, or None.

  The one that PYTHON names comes first, if it is of that version.
  """
  if (python := named()) and minor(python.version) == minor(version):
    return python
  for path in candidates(version):
    python = probe(path)
    if python and minor(python.version) == minor(version):
      return python
  return None


def named() -> Interpreter | None:
  """Returns the interpreter that PYTHON names, or None if it names none.

  Raises:
    UserError: It names something that will not do.
  """
  command = os.environ.get("PYTHON", "").strip()
  if not command:
    return None
  if python := probe(command):
    return python
  raise UserError(
      f"expected PYTHON to name a Python that has venv, got PYTHON={command},"
      " which does not run or lacks it. Name another one, or none"
  )
