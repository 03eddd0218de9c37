"""`overlay`: a patched copy of the installed JAX, in a folder of its own."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import dataclasses
import os
import pathlib
import shutil
import site
import subprocess
import sys
import sysconfig
import tempfile

from jax_mgpu_ext._src.patchset import git as git_lib
from jax_mgpu_ext._src.patchset import legal
from jax_mgpu_ext._src.patchset import problems
from jax_mgpu_ext._src.patchset import series
from jax_mgpu_ext._src.patchset import sources
from jax_mgpu_ext._src.patchset import workspace as workspace_lib

# Compiled files would be those of the unpatched sources.
_LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc", "*.pyo")
_IMPORT_TIMEOUT_S = 300.0

_IMPORTS = """
import importlib, pathlib, sys
root, *names = sys.argv[1:]
for name in names:
  file = pathlib.Path(importlib.import_module(name).__file__).resolve()
  if not file.is_relative_to(root):
    sys.exit(f"{name} comes from {file}")
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Overlay:
  """A patched copy.

  Attributes:
    release: The JAX release.
    folder: What to put on PYTHONPATH; it holds `jax`.
    slugs: The patches, in order.
  """

  release: str
  folder: pathlib.Path
  slugs: tuple[str, ...]


@problems.reports_os_errors
def overlay(
    out: pathlib.Path,
    patches: pathlib.Path | None = None,
    *,
    root: pathlib.Path | None = None,
) -> Overlay:
  """Copies the installed `jax` into a folder and patches the copy.

  On failure, and on Ctrl-C, the folder is as it was. What patches do to JAX's
  own tests is left out, since a package has none.

  Args:
    out: The folder; it must be empty, or not exist while its parent does.
    patches: The folder of patches; by default that of the clone.
    root: The folder that holds the package `jax`; by default the installed one.

  Raises:
    PatchError: The folder will not do, there are no patches for this JAX, they
      are not as they should be, or the patched copy cannot be imported.
  """
  patches = patches or series.default_folder()
  root = (root or sources.installed_root()).resolve()
  item = series.find_release(patches, sources.version_of(root))
  read = series.load(item)
  sources.require_unpatched(item, read, root)
  out = out.resolve()
  require_empty(out, root)
  with workspace_lib.temporary() as workspace:
    workspace.commit(workspace_lib.base_files(read, root), "base")
    workspace_lib.require_replay(workspace, item, read)
    changed = {
        change.path: sources.read(workspace.folder, change.path)
        for patch in read
        for change in patch.changes
        if change.path.startswith(legal.SOURCES)
    }
  with filled(out) as staging:
    shutil.copytree(root / "jax", staging / "jax", ignore=_LEFT_OUT)
    for path, data in changed.items():
      target = staging / path
      if data is None:
        target.unlink(missing_ok=True)
      else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)  # It may be read-only, as its original.
        target.write_bytes(data)
    _require_importable(staging, [p for p, data in changed.items() if data])
  return Overlay(
      release=item.release, folder=out, slugs=tuple(p.slug for p in read)
  )


def require_empty(out: pathlib.Path, root: pathlib.Path) -> None:
  """Checks that a folder can be filled: empty, and not among packages.

  Args:
    out: The folder, resolved.
    root: The folder that holds the package `jax`.

  Raises:
    PatchError: It cannot.
  """
  for place in (root, *_package_folders()):
    if out == place or place in out.parents:
      raise problems.PatchError(
          f"{out} is inside {place}, where packages are installed; choose"
          " another folder"
      )
  if {"site-packages", "dist-packages"} & set(out.parts):
    raise problems.PatchError(
        f"{out} is inside a folder of installed packages; choose another"
    )
  try:
    if not out.exists():
      if not out.parent.is_dir():
        raise problems.PatchError(f"there is no folder {out.parent}")
    elif not out.is_dir() or any(out.iterdir()):
      raise problems.PatchError(f"expected an empty or a new folder, got {out}")
  except OSError as e:
    raise problems.PatchError(f"cannot look at {out}: {e.strerror}") from e


@contextlib.contextmanager
def filled(out: pathlib.Path) -> Iterator[pathlib.Path]:
  """Fills a folder, or leaves it as it was.

  Yields:
    A folder inside of `out`, whose content is moved up when the block ends.

  Raises:
    PatchError: Something cannot be written.
  """
  existed = out.exists()
  ours: list[pathlib.Path] = []
  try:
    out.mkdir(exist_ok=True)
    staging = pathlib.Path(tempfile.mkdtemp(prefix=".partial-", dir=out))
    ours.append(staging)
    yield staging
    for path in list(staging.iterdir()):
      ours.append(out / path.name)
      path.rename(out / path.name)
    staging.rmdir()
  except BaseException as e:
    with git_lib.deferred_interrupts():
      _remove(ours, None if existed else out)
    if isinstance(e, OSError):  # And shutil's errors, which are of that type.
      raise problems.PatchError(
          f"cannot write to {out}: {problems.os_reason(e)}"
      ) from e
    raise


def _remove(paths: list[pathlib.Path], folder: pathlib.Path | None) -> None:
  for path in paths:
    if path.is_dir():
      shutil.rmtree(path, ignore_errors=True)
    else:
      path.unlink(missing_ok=True)
  if folder is not None:
    with contextlib.suppress(OSError):
      folder.rmdir()


def _package_folders() -> set[pathlib.Path]:
  folders = [*site.getsitepackages(), site.getusersitepackages()]
  folders += [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
  return {pathlib.Path(folder).resolve() for folder in folders}


def _require_importable(staging: pathlib.Path, paths: list[str]) -> None:
  """Imports `jax` and every patched module from a copy, in a child process."""
  names = ["jax"]
  for path in paths:
    if path.endswith(".py"):
      parts = path.removesuffix(".py").split("/")
      names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
  search = [str(staging), *filter(None, [os.environ.get("PYTHONPATH")])]
  try:
    result = subprocess.run(
        # -B: no compiled files in the copy. -P: nothing from this folder.
        [sys.executable, "-B", "-P", "-c", _IMPORTS, str(staging), *names],
        env={
            **os.environ,
            "JAX_MGPU_EXT": "off",
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": os.pathsep.join(search),
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_IMPORT_TIMEOUT_S,
        check=False,
    )
  except subprocess.TimeoutExpired as e:
    raise problems.PatchError(
        f"the patched copy is not imported after {e.timeout:.0f} s"
    ) from e
  if result.returncode:
    lines = result.stderr.strip().splitlines() or ["no output"]
    raise problems.PatchError(
        f"the patched copy cannot be imported: {lines[-1]}"
    )
