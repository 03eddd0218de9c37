"""The virtual environments of this clone, for `tools/tasks.py`.

An environment is used only if its stamp, which is written last, says that it
was finished and is up to date; any other one is made anew.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import time

import interpreters
from interpreters import UserError

ROOT = pathlib.Path(__file__).resolve().parent.parent
EXTRAS = "aot,dask,test"
STAMP = "mgpu-ext-environment.json"

_LIST_PACKAGES = """
import importlib.metadata as metadata, json
print(json.dumps({d.name: d.version for d in metadata.distributions()}))
"""


@dataclasses.dataclass(frozen=True)
class Releases:
  """What `jax_mgpu_ext/_src/releases.py` says of JAX's releases.

  Attributes:
    supported: The releases, oldest first.
    default: The one that `.venv` has.
    pythons: The Python, as `3.12`, that each release is tested with.
  """

  supported: tuple[str, ...]
  default: str
  pythons: dict[str, str]


def read_releases() -> Releases:
  """Reads the table without importing the package, which would need JAX."""
  path = ROOT / "jax_mgpu_ext" / "_src" / "releases.py"
  table = {}
  for node in ast.parse(path.read_text(encoding="utf-8")).body:
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
      if node.targets[0].id in ("SUPPORTED", "DEFAULT", "PYTHONS"):
        table[node.targets[0].id.lower()] = ast.literal_eval(node.value)
  return Releases(**table)


@dataclasses.dataclass(frozen=True)
class Environment:
  """A virtual environment of this clone.

  Attributes:
    folder: Where it is.
    release: The release of JAX in it.
    interpreter: The Python that it is made with.
  """

  folder: pathlib.Path
  release: str
  interpreter: interpreters.Interpreter

  @property
  def python(self) -> str:
    return str(self.folder / "bin" / "python")

  def prepare(self) -> None:
    """Makes it, unless it can be used as it is."""
    if self.fault():
      with lock() as file:
        # Another run may have made it while this one waited.
        if fault := self.fault():
          self._make(fault, file)

  def fault(self) -> str:
    """Returns why it cannot be used as it is, empty if it can."""
    if not os.path.lexists(self.folder):
      return "is not there"
    stamp = read_stamp(self.folder)
    if not stamp.get("packages"):
      return "is not finished"
    for key, value in self._wanted().items():
      if stamp.get(key) != value:
        return f"was made for another {key}"
    found = self._packages()
    for name, version in stamp["packages"].items():
      if found.get(name) != version:
        return f"has lost {name} {version}"
    return ""

  def _wanted(self) -> dict[str, str]:
    pyproject = (ROOT / "pyproject.toml").read_bytes()
    return {
        "release": self.release,
        "python": self.interpreter.version,
        "folder": str(self.folder),  # A moved clone has wrong paths all over.
        "extras": EXTRAS,
        "pyproject.toml": hashlib.sha256(pyproject).hexdigest(),
    }

  def _packages(self) -> dict[str, str]:
    try:
      done = subprocess.run(
          [self.python, "-I", "-c", _LIST_PACKAGES],
          capture_output=True,
          check=True,
      )
      return json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
      return {}

  def _make(self, fault: str, lock_file: int) -> None:
    say(
        f"{self.folder.name} {fault}: making it with Python"
        f" {self.interpreter.version} and JAX {self.release} (this downloads"
        " some 400 MB)"
    )
    start = time.monotonic()
    _clear(self.folder)
    self.folder.mkdir()
    # An empty stamp tells a half-made environment from somebody else's.
    _write_stamp(self.folder, {})
    steps = (
        [self.interpreter.path, "-m", "venv", str(self.folder)],
        # Twice quiet: errors only.
        [self.python, "-m", "pip", "install", "-qq", "--no-input",
         "--disable-pip-version-check", f"jax=={self.release}",
         "--editable", f".[{EXTRAS}]"],
    )
    for step in steps:
      # The child keeps the lock's file open too: should this process be
      # killed, the next one still waits until pip has ended.
      done = subprocess.run(
          step,
          cwd=ROOT,
          stdin=subprocess.DEVNULL,
          env=interpreters.clean_environ(),
          pass_fds=(lock_file,),
          check=False,
      )
      if done.returncode:
        raise UserError(
            f"could not make {self.folder.name}: `{' '.join(step)}` ended with"
            f" status {done.returncode}. Mend what it says above and run the"
            " same command again"
        )
    _write_stamp(self.folder, {**self._wanted(), "packages": self._packages()})
    say(f"{self.folder.name} is ready, {time.monotonic() - start:.0f} s")


def read_stamp(folder: pathlib.Path) -> dict:
  """Returns what an environment's stamp says, empty if there is none."""
  try:
    return json.loads((folder / STAMP).read_text(encoding="utf-8"))
  except (OSError, ValueError):
    return {}


def _write_stamp(folder: pathlib.Path, stamp: dict) -> None:
  part = folder / f"{STAMP}.part"
  text = json.dumps(stamp, indent=2, sort_keys=True)
  part.write_text(f"{text}\n", encoding="utf-8")
  part.replace(folder / STAMP)


def _clear(folder: pathlib.Path) -> None:
  """Removes an environment, or moves it away if somebody else made it."""
  trash = folder.with_name(f"{folder.name}-trash")
  remove(trash)
  if (folder / STAMP).exists():
    folder.rename(trash)  # So that what is half removed is never in place.
    remove(trash)
  elif os.path.lexists(folder):
    saved = folder.with_name(f"{folder.name}-saved-{time.time_ns()}")
    folder.rename(saved)
    say(f"{folder.name} was not made by make; it is {saved.name} now")


def remove(path: pathlib.Path) -> None:
  if path.is_dir() and not path.is_symlink():
    shutil.rmtree(path)
  else:
    path.unlink(missing_ok=True)


@contextlib.contextmanager
def lock() -> Iterator[int]:
  """Lets one process at a time make environments; yields the lock's file."""
  with open(ROOT / ".venv-lock", "w", encoding="utf-8") as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      say("waiting for another run, which is making an environment")
      fcntl.flock(file, fcntl.LOCK_EX)
    yield file.fileno()


def say(text: str) -> None:
  print(f"environments: {text}", flush=True)
