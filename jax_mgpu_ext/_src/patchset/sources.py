"""Sources of JAX on disk: which release they are, which patches they have."""

from __future__ import annotations

from collections.abc import Sequence
import hashlib
import importlib.util
import os
import pathlib
import re

from jax_mgpu_ext._src import releases
from jax_mgpu_ext._src.patchset import legal
from jax_mgpu_ext._src.patchset import mail
from jax_mgpu_ext._src.patchset import problems
from jax_mgpu_ext._src.patchset import series

_VERSION = re.compile(
    r"^(?:_release_version|_version)\b[^=\n]*=\s*['\"]([\w.+]+)['\"]", re.M
)


def installed_root() -> pathlib.Path:
  """Returns the folder that holds the installed package `jax`.

  Raises:
    PatchError: JAX is not installed.
  """
  spec = importlib.util.find_spec("jax")
  if spec is None or not spec.origin:
    raise problems.PatchError("JAX is not installed in this environment")
  return pathlib.Path(spec.origin).resolve().parent.parent


def version_of(root: pathlib.Path) -> str:
  """Returns the supported release that a folder's `jax` says it is.

  Args:
    root: A folder that holds the package `jax`.

  Raises:
    PatchError: There is no JAX in it.
  """
  try:
    text = (root / "jax" / "version.py").read_text(encoding="utf-8")
  except (OSError, UnicodeDecodeError):
    text = ""
  versions = _VERSION.findall(text)
  if not versions:
    raise problems.PatchError(
        f"expected a folder with the package jax, got {root} (no jax/version.py"
        " with a version)"
    )
  return releases.canonical(versions[-1])


def blob_id(data: bytes | None) -> str:
  """Returns git's id of a file's content, zeros for None."""
  if data is None:
    return "0" * 40
  return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def read(root: pathlib.Path, path: str) -> bytes | None:
  """Returns a file, or None if there is none."""
  try:
    return (root / path).read_bytes()
  except (FileNotFoundError, NotADirectoryError):
    return None
  except OSError as e:
    raise problems.PatchError(f"cannot read {root / path}: {e.strerror}") from e


def require_unpatched(
    release: series.Release,
    patches: Sequence[mail.Patch],
    root: pathlib.Path,
) -> None:
  """Checks that a tree has the very texts that a series is for.

  Raises:
    PatchError: It is another release, or the series is applied, or a part of
      it; the text says which.
  """
  clean, patched = [], []
  has_tests = (root / legal.TESTS).is_dir()
  for path in sorted({c.path for p in patches for c in p.changes}):
    if path.startswith(legal.TESTS) and not has_tests:
      continue  # An installed package, or a copy of one.
    data = read(root, path)
    state = _state(release, patches, root, path, data)
    (patched if state else clean).append((path, state))
  final = {c.path: c.new for p in patches for c in p.changes}
  if not patched:
    return
  if not clean and all(
      blob_id(read(root, path)) == final[path] for path, _ in patched
  ):
    raise problems.PatchError(
        f"{root} has the whole series {release.name} already"
    )
  path, name = patched[0]
  other = f"{clean[0][0]} has not" if clean else "later ones are missing"
  raise problems.PatchError(
      f"{root} is half patched: {path} has {name}, {other}; restore its files"
  )


def _state(release, patches, root, path, data) -> str:
  """Returns the last patch that a file has, empty if it has none."""
  steps = [(p.name, c) for p in patches for c in p.changes if c.path == path]
  found = blob_id(data)
  is_base = found == steps[0][1].old
  if data is not None and path in release.sha256:
    is_base = hashlib.sha256(data).hexdigest() == release.sha256[path]
  elif steps[0][1].kind != "add" and path not in release.sha256:
    raise problems.PatchError(
        f"{series.RELEASES} has no sha256 of {path} for {release.name}"
    )
  if is_base:
    if data is None and os.path.lexists(root / path):  # A broken link.
      raise problems.PatchError(
          f"{root} has another {path} already, a link to nothing, which"
          f" {steps[0][0]} would add"
      )
    return ""
  for name, change in reversed(steps):
    if found == change.new:
      return name
  if data is None:
    raise problems.PatchError(
        f"{root} is not JAX {release.release}: it has no {path}"
    )
  if steps[0][1].kind == "add":
    raise problems.PatchError(
        f"{root} has another {path} already, which {steps[0][0]} would add"
    )
  raise problems.PatchError(
      f"{root} is not JAX {release.release}: {path} has the sha256"
      f" {hashlib.sha256(data).hexdigest()[:16]}..., expected"
      f" {release.sha256[path][:16]}..."
  )
