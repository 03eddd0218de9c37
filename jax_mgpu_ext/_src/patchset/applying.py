"""`apply`: a series as commits on a git checkout of JAX."""

from __future__ import annotations

from collections.abc import Collection, Sequence
import contextlib
import dataclasses
import os
import pathlib

from jax_mgpu_ext._src.patchset import git as git_lib
from jax_mgpu_ext._src.patchset import mail
from jax_mgpu_ext._src.patchset import problems
from jax_mgpu_ext._src.patchset import series
from jax_mgpu_ext._src.patchset import sources
from jax_mgpu_ext._src.patchset import workspace as workspace_lib

# What git keeps in its folder while it is in the middle of something.
_UNFINISHED = (
    "rebase-apply", "rebase-merge", "MERGE_HEAD", "CHERRY_PICK_HEAD",
    "REVERT_HEAD",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Applied:
  """What was applied.

  Attributes:
    release: The JAX release.
    base: The commit that the series stands on.
    head: The commit of the last patch.
    slugs: The patches, in order.
  """

  release: str
  base: str
  head: str
  slugs: tuple[str, ...]


@problems.reports_os_errors
def apply(
    tree: pathlib.Path,
    patches: pathlib.Path | None = None,
    *,
    release: str | None = None,
) -> Applied:
  """Applies a series to a git checkout with `git am`, or changes nothing.

  Files that git does not know stay as they are, unless a patch would add them,
  which is an error.

  Args:
    tree: The top of the checkout.
    patches: The folder of patches; by default that of the clone.
    release: The JAX release; by default the one that the tree says it is.

  Raises:
    PatchError: The tree is no checkout, dirty, of another release or patched,
      or the series is not as it should be.
  """
  patches = patches or series.default_folder()
  git = checkout(tree)
  _require_unlocked(git)
  if release is None:
    release = sources.version_of(tree)
  item = series.find_release(patches, release)
  read = series.load(item)
  sources.require_unpatched(item, read, tree)
  # First where nothing can be spoiled.
  with workspace_lib.temporary() as workspace:
    workspace.commit(workspace_lib.base_files(read, tree), "base")
    workspace_lib.require_replay(workspace, item, read)
  base = git.line("rev-parse", "HEAD")
  mails = [str((item.folder / patch.name).resolve()) for patch in read]
  added = {c.path for p in read for c in p.changes if c.kind == "add"}
  absent = {path for path in added if not os.path.lexists(tree / path)}
  try:
    result = git.run(*workspace_lib.AM, "--", *mails)
    if result.returncode:
      raise problems.PatchError(
          f"{item.name} does not apply to {tree}: {git_lib.reason(result)}"
      )
    _require_final(tree, read)
    head = git.line("rev-parse", "HEAD")
  except BaseException as e:
    with git_lib.deferred_interrupts():
      failure = _restore(git, base, absent)
    if failure:
      raise problems.PatchError(
          f"{str(e) or 'interrupted'}; and {tree} could not be put back"
          f" ({failure}); run git reset --hard {base} there"
      ) from e
    raise
  return Applied(
      release=item.release,
      base=base,
      head=head,
      slugs=tuple(patch.slug for patch in read),
  )


def checkout(tree: pathlib.Path) -> git_lib.Git:
  """Returns git for the top of a clean checkout.

  Raises:
    PatchError: It is none, or not clean, or in the middle of something.
  """
  if not tree.is_dir():
    raise problems.PatchError(f"expected a git checkout, got {tree}: no folder")
  git = git_lib.Git(tree)
  top = git.run("rev-parse", "--show-toplevel")
  if top.returncode:
    raise problems.PatchError(
        f"{tree} is not a git checkout ({git_lib.reason(top)}); an installed"
        " package is patched as a copy, with overlay"
    )
  found = pathlib.Path(top.stdout.decode("utf-8", "replace").rstrip("\n"))
  if found.resolve() != tree.resolve():
    raise problems.PatchError(
        f"{tree} is not the top of a git checkout; that is {found}"
    )
  if git.run("rev-parse", "--verify", "--quiet", "HEAD").returncode:
    raise problems.PatchError(f"{tree} has no commit yet")
  for name in _UNFINISHED:
    if _git_path(git, name).exists():
      raise problems.PatchError(
          f"{tree} is in the middle of another git command ({name}); finish or"
          " abort it"
      )
  changed = git.out("status", "--porcelain", "--untracked-files=no", "-z")
  if changed:
    first = changed.split(b"\0")[0].decode("utf-8", "replace")
    raise problems.PatchError(
        f"{tree} has changes that are not committed: {first[3:]}; commit or"
        " stash them"
    )
  return git


def _require_unlocked(git: git_lib.Git) -> None:
  lock = _git_path(git, "index.lock")
  if os.path.lexists(lock):
    raise problems.PatchError(
        f"{git.folder} is locked by another git command: {lock} exists; wait"
        " for it to end, or remove the file if none is running"
    )


def _git_path(git: git_lib.Git, name: str) -> pathlib.Path:
  return git.folder / git.line("rev-parse", "--git-path", name)


def _require_final(tree: pathlib.Path, patches: Sequence[mail.Patch]) -> None:
  """Checks that all files are as the patches say."""
  final = {c.path: c.new for patch in patches for c in patch.changes}
  for path, expected in final.items():
    if sources.blob_id(sources.read(tree, path)) != expected:
      raise problems.PatchError(
          f"git left another {path} in {tree} than the series says"
      )


def _restore(git: git_lib.Git, base: str, absent: Collection[str]) -> str:
  """Puts a checkout, which was clean, back to a commit.

  Args:
    git: git in the checkout.
    base: The commit.
    absent: Files that were not there before, not even as a broken link.

  Returns:
    Why it could not be put back, empty if it is as it was.
  """
  state = _git_path(git, "rebase-apply")
  if state.exists():
    if git.run("am", "--abort").returncode:
      git.run("am", "--quit")
  result = git.run("reset", "--hard", "--quiet", base)
  if not result.returncode:
    for path in sorted(absent):
      with contextlib.suppress(OSError):
        (git.folder / path).unlink()  # Written, and not yet known to git.
    return ""
  head = git.run("rev-parse", "HEAD").stdout.decode("ascii", "replace").strip()
  changed = git.run("status", "--porcelain", "--untracked-files=no")
  if (
      head == base
      and not changed.returncode
      and not changed.stdout
      and not state.exists()
      and not any(os.path.lexists(git.folder / path) for path in absent)
  ):
    return ""  # git am has not changed anything either.
  return git_lib.reason(result)
