"""`apply`: a series as commits on a git checkout of JAX."""

from __future__ import annotations

from collections.abc import Sequence
import contextlib
import dataclasses
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
  patches = patches or series.DEFAULT
  git = checkout(tree)
  item = series.find_release(patches, release or sources.version_of(tree))
  read = series.load(item)
  sources.require_unpatched(item, read, tree)
  # First where nothing can be spoiled.
  with workspace_lib.temporary() as workspace:
    workspace.commit(workspace_lib.base_files(read, tree), "base")
    workspace_lib.require_replay(workspace, item, read)
  base = git.line("rev-parse", "HEAD")
  mails = [str((item.folder / patch.name).resolve()) for patch in read]
  try:
    result = git.run(*workspace_lib.AM, "--", *mails)
    if result.returncode:
      raise problems.PatchError(
          f"{item.name} does not apply to {tree}: {git_lib.reason(result)}"
      )
    _require_final(tree, read)
    head = git.line("rev-parse", "HEAD")
  except BaseException:
    with git_lib.deferred_interrupts():
      _restore(git, base, read)
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


def _restore(
    git: git_lib.Git, base: str, patches: Sequence[mail.Patch]
) -> None:
  """Puts a checkout, which was clean, back to a commit."""
  if _git_path(git, "rebase-apply").exists():
    if git.run("am", "--abort").returncode:
      git.run("am", "--quit")
  if git.run("reset", "--hard", "--quiet", base).returncode:
    raise problems.PatchError(
        f"{git.folder} could not be put back; run git reset --hard {base} there"
    )
  added = {c.path for p in patches for c in p.changes if c.kind == "add"}
  base_files = set(series.base_paths(patches))
  for path in sorted(added - base_files):
    with contextlib.suppress(OSError):
      (git.folder / path).unlink()  # Written, and not yet known to git.
