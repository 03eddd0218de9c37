"""`rebase`: the series of one release on the sources of another."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import re

from jax_mgpu_ext._src.patchset import git as git_lib
from jax_mgpu_ext._src.patchset import mail
from jax_mgpu_ext._src.patchset import overlaying
from jax_mgpu_ext._src.patchset import problems
from jax_mgpu_ext._src.patchset import series
from jax_mgpu_ext._src.patchset import sources
from jax_mgpu_ext._src.patchset import workspace as workspace_lib

_DEFINITION = re.compile(r"\s*(?:async def|def|class) (\w+)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conflict:
  """A patch that a person must look at.

  Attributes:
    slug: The patch.
    places: File and hunk of each conflict, as
      `jax/_src/pallas/core.py, lines 10 to 20 (in kernel)`.
  """

  slug: str
  places: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rebased:
  """How far a series came.

  Attributes:
    release: The JAX release that it is for now.
    folder: A git repository with the release's files as its first commit,
      tagged as the release, and the patches on top.
    applied: The patches that are commits there.
    unneeded: Those whose change the release has already.
    conflict: The first one that does not apply; git waits in the folder for
      `git am --continue`.
    remaining: Those after it.
    three_way: Whether the texts that the patches were made for were at hand.
  """

  release: str
  folder: pathlib.Path
  applied: tuple[str, ...]
  unneeded: tuple[str, ...]
  conflict: Conflict | None
  remaining: tuple[str, ...]
  three_way: bool


@problems.reports_os_errors
def rebase(
    from_release: str,
    to_release: str,
    out: pathlib.Path,
    patches: pathlib.Path | None = None,
    *,
    root: pathlib.Path | None = None,
    from_root: pathlib.Path | None = None,
) -> Rebased:
  """Applies a series to another release, in a repository made for it.

  The folder of patches is only read: `export` writes it, from the repository.

  Args:
    from_release: The release whose series it is.
    to_release: The other one; it must have a table in `releases.toml`.
    out: The folder for the repository; it must be empty, or not exist while its
      parent does. On an error it is as it was; a conflict is no error.
    patches: The folder of patches; by default that of the clone.
    root: A folder that holds the package `jax` of `to_release`; by default the
      installed one.
    from_root: The same for `from_release`. Without it, where the installed JAX
      is another one and `root` is no git checkout that has the tag, hunks that
      do not apply cannot be merged, and are left as `.rej` files.

  Raises:
    PatchError: An argument will not do, or the series is not as it should be.
  """
  patches = patches or series.default_folder()
  old = series.find_release(patches, from_release)
  new = series.find_release(patches, to_release)
  if old.release == new.release:
    raise problems.PatchError(f"expected two releases, got {old.release} twice")
  read = series.load(old)
  root = (root or sources.installed_root()).resolve()
  version = sources.version_of(root)
  if version != new.release:
    raise problems.PatchError(
        f"expected the sources of JAX {new.release}, got JAX {version} in"
        f" {root}"
    )
  out = out.resolve()
  overlaying.require_empty(out, root)
  old_files = _old_files(old, read, root, from_root)
  with overlaying.filled(out) as staging:
    space = workspace_lib.Workspace(staging)
    if old_files is not None:
      space.commit(old_files, f"JAX {old.release}")
      workspace_lib.require_replay(space, old, read)
      # Its commits stay, for the merges to find the texts in them.
      space.git.out("branch", "--move", f"series-{old.release}")
      space.git.out("checkout", "--quiet", "--orphan", "patched")
      space.git.out("rm", "-r", "--quiet", "--force", ".")
    space.commit(workspace_lib.base_files(read, root), f"JAX {new.release}")
    space.git.out("tag", new.tag)
    result = _replay(space, read)
  return dataclasses.replace(
      result, release=new.release, folder=out, three_way=old_files is not None
  )


def _old_files(release, patches, root, from_root):
  """Returns the files of the release that the patches are for, or None."""
  if from_root is None:
    with contextlib.suppress(problems.PatchError):  # No JAX is installed.
      installed = sources.installed_root()
      if sources.version_of(installed) == release.release:
        from_root = installed
  if from_root is not None:
    sources.require_unpatched(release, patches, from_root)
    return workspace_lib.base_files(patches, from_root)
  git = git_lib.Git(root)
  modes = {c.path: c.mode for p in reversed(patches) for c in p.changes}
  files = {}
  for path in series.base_paths(patches):
    result = git.run("cat-file", "blob", f"refs/tags/{release.tag}:{path}")
    if result.returncode:
      return None
    files[path] = result.stdout, modes[path]
  return files


def _replay(space: workspace_lib.Workspace, patches) -> Rebased:
  """Applies patch after patch up to the first conflict."""
  applied, unneeded, conflict = [], [], None
  remaining = [patch.slug for patch in patches]
  for patch in patches:
    head = space.git.line("rev-parse", "HEAD")
    remaining.remove(patch.slug)
    result = space.am(patch, "--3way")
    if result.returncode:
      conflict = Conflict(slug=patch.slug, places=_places(space, patch))
      break
    same = head == space.git.line("rev-parse", "HEAD")
    (unneeded if same else applied).append(patch.slug)
  return Rebased(
      release="",
      folder=space.folder,
      applied=tuple(applied),
      unneeded=tuple(unneeded),
      conflict=conflict,
      remaining=tuple(remaining),
      three_way=False,
  )


def _places(space, patch: mail.Patch) -> tuple[str, ...]:
  """Names the conflicts; writes `.rej` files if git could not even merge."""
  unmerged = space.git.line("diff", "--name-only", "--diff-filter=U")
  places = []
  for path in unmerged.splitlines():
    places += _marked(space.folder, path) or [f"{path}, added or deleted"]
  if places:
    return tuple(places)
  result = space.git.run("apply", "--reject", "-", stdin=patch.data)
  for change in patch.changes:
    rejected = sources.read(space.folder, f"{change.path}.rej")
    if rejected is not None:
      for line in rejected.decode("utf-8", "replace").splitlines():
        if line.startswith("@@"):
          places.append(f"{change.path}, hunk {line}")
    elif change.kind != "add" and not (space.folder / change.path).exists():
      places.append(f"{change.path}, which is not there")
  return tuple(places) or (git_lib.reason(result),)


def _marked(folder: pathlib.Path, path: str) -> list[str]:
  """Returns the places between git's conflict markers."""
  text = (sources.read(folder, path) or b"").decode("utf-8", "replace")
  places, start, inside = [], 0, ""
  for number, line in enumerate(text.split("\n"), 1):
    if line.startswith("<<<<<<< "):
      start = number
    elif line.startswith(">>>>>>> ") and start:
      name = f" (in {inside})" if inside else ""
      places.append(f"{path}, lines {start} to {number}{name}")
      start = 0
    match = _DEFINITION.match(line)
    if match and not start:
      inside = match[1]
  return places
