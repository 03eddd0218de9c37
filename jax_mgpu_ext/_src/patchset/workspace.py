"""A git repository of its own, with only the files that a series touches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import pathlib
import subprocess
import tempfile

from jax_mgpu_ext._src.patchset import git as git_lib
from jax_mgpu_ext._src.patchset import mail
from jax_mgpu_ext._src.patchset import problems
from jax_mgpu_ext._src.patchset import series
from jax_mgpu_ext._src.patchset import sources

# All that a configuration, or another version of git, could decide otherwise.
_EXPORT = (
    "format-patch", "-1", "--stdout", "--zero-commit", "--full-index",
    "--no-signature", "--no-stat", "--keep-subject", "--no-renames",
    "--no-attach", "--no-thread", "--no-notes", "--no-color", "--no-ext-diff",
    "--no-textconv", "--text", "--unified=3", "--inter-hunk-context=0",
    "--diff-algorithm=myers", "--indent-heuristic", "--src-prefix=a/",
    "--dst-prefix=b/",
)
# The committer's date too comes from the patch, so that a commit has one id.
AM = ("am", "--quiet", "--keep-non-patch", "--committer-date-is-author-date")


class Workspace:
  """The repository.

  Attributes:
    folder: Its working tree.
    git: git in it.
  """

  def __init__(
      self, folder: pathlib.Path, *, alternates: pathlib.Path | None = None
  ):
    self.folder = folder
    self.git = git_lib.Git(folder, alternates=alternates)
    self.git.out("init", "--quiet", "--template=", "--initial-branch=patched")

  def commit(
      self, files: Mapping[str, tuple[bytes, str]], message: str
  ) -> None:
    """Writes files and commits them.

    Args:
      files: Path -> content and git's mode.
      message: The commit's message.
    """
    for path, (data, mode) in files.items():
      target = self.folder / path
      target.parent.mkdir(parents=True, exist_ok=True)
      target.write_bytes(data)
      target.chmod(0o755 if mode == "100755" else 0o644)
    self.git.out("add", "--all", "--force")
    self.git.out("commit", "--quiet", "--allow-empty", f"--message={message}")

  def am(
      self, patch: mail.Patch, *options: str
  ) -> subprocess.CompletedProcess[bytes]:
    """Applies a patch as a commit, and returns how it went."""
    return self.git.run(*AM, *options, stdin=patch.data)

  def export(self, commit: str = "HEAD") -> bytes:
    """Returns a commit as a patch file."""
    return self.git.out(*_EXPORT, commit)


@contextlib.contextmanager
def temporary(*, alternates: pathlib.Path | None = None) -> Iterator[Workspace]:
  """Makes a workspace for a `with` block."""
  with tempfile.TemporaryDirectory(prefix="mgpu-ext-patches-") as folder:
    yield Workspace(pathlib.Path(folder).resolve(), alternates=alternates)


def base_files(
    patches: Sequence[mail.Patch], root: pathlib.Path
) -> dict[str, tuple[bytes, str]]:
  """Returns content and mode of the files of a tree that a series changes."""
  modes: dict[str, str] = {}
  for patch in patches:
    for change in patch.changes:
      modes.setdefault(change.path, change.mode)
  contents = {p: sources.read(root, p) for p in series.base_paths(patches)}
  return {p: (c, modes[p]) for p, c in contents.items() if c is not None}


def replay(
    workspace: Workspace, release: series.Release, patches: Sequence[mail.Patch]
) -> Iterator[problems.Problem]:
  """Applies a series, and yields what is not as it should be.

  Stops at the first patch that does not apply.
  """
  for patch in patches:
    result = workspace.am(patch)
    if result.returncode:
      yield problems.Problem(
          release=release.name,
          file=patch.name,
          text=f"does not apply: {git_lib.reason(result)}",
      )
      return
    difference = _difference(patch.data, workspace.export())
    if difference:
      yield problems.Problem(
          release=release.name, file=patch.name, text=difference
      )


def _difference(data: bytes, exported: bytes) -> str:
  if data == exported:
    return ""
  ours = data.decode("utf-8", "replace").split("\n")
  theirs = exported.decode("utf-8", "replace").split("\n")
  at = 0
  while ours[at : at + 1] == theirs[at : at + 1]:
    at += 1
  line, expected = (
      f"{lines[at][:60]!r}" if at < len(lines) else "nothing"
      for lines in (ours, theirs)
  )
  return (
      f"differs from its export in line {at + 1}: {line} instead of {expected};"
      " was it edited by hand?"
  )


def require_replay(
    workspace: Workspace, release: series.Release, patches: Sequence[mail.Patch]
) -> None:
  """As `replay`.

  Raises:
    PatchError: Anything is not as it should be.
  """
  for problem in replay(workspace, release, patches):
    raise problems.PatchError(str(problem))
