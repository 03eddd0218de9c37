"""`export`: commits on top of a release, back to patch files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import hashlib
import os
import pathlib
import re
import tempfile

from jax_mgpu_ext._src.patchset import applying
from jax_mgpu_ext._src.patchset import git as git_lib
from jax_mgpu_ext._src.patchset import legal
from jax_mgpu_ext._src.patchset import mail
from jax_mgpu_ext._src.patchset import problems
from jax_mgpu_ext._src.patchset import series
from jax_mgpu_ext._src.patchset import workspace as workspace_lib

_UNNAMED = "commit.patch"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exported:
  """What was exported.

  Attributes:
    release: The JAX release.
    slugs: The patches, in order.
    written: The files that are new or changed, relative to the folder of
      patches.
    removed: The files that have no commit any more.
  """

  release: str
  slugs: tuple[str, ...]
  written: tuple[str, ...]
  removed: tuple[str, ...]


@problems.reports_os_errors
def export(
    tree: pathlib.Path,
    release: str,
    patches: pathlib.Path | None = None,
    *,
    base: str | None = None,
) -> Exported:
  """Writes the commits of a checkout as the series of a release.

  Files that do not change are not touched. In the series file, comments stay
  with the line that they stand above.

  Args:
    tree: The top of a git checkout.
    release: The JAX release; it must have a table in `releases.toml`.
    patches: The folder of patches; by default that of the clone.
    base: The commit below the first patch, with the files that the release's
      table has hashes of; by default the release's tag, and without one the
      first commit, from the top, that has no `Hook:` trailer.

  Raises:
    PatchError: A commit is no legal patch, or the tree will not do.
  """
  patches = patches or series.default_folder()
  item = series.find_release(patches, release)
  git = applying.checkout(tree)
  start = _base(git, item, base)
  if git.out("rev-list", "--merges", f"{start}..HEAD"):
    raise problems.PatchError(f"{tree} has a merge on top of {start[:12]}")
  commits = git.line("rev-list", "--reverse", f"{start}..HEAD").split()
  if not commits:
    raise problems.PatchError(f"{tree} has no commit on top of {start[:12]}")
  objects = pathlib.Path(git.line("rev-parse", "--git-path", "objects"))
  read = []
  # Not in the tree itself, whose own configuration and attributes would count.
  with workspace_lib.temporary(alternates=(tree / objects).resolve()) as space:
    for commit in commits:
      read.append(_patch(space.export(commit), commit))
  for name, text in legal.chain_faults(read):
    raise problems.PatchError(f"{name} {text}")
  names = [patch.name for patch in read]
  for name in names:
    if names.count(name) > 1:
      raise problems.PatchError(f"two commits would both be {name}")
  files: dict[pathlib.Path, bytes | None] = {
      item.folder / patch.name: patch.data for patch in read
  }
  if item.folder.is_dir():
    for path in item.folder.glob("*.patch"):
      files.setdefault(path, None)
  files[item.folder / series.SERIES] = _series_text(item, names).encode()
  files[patches / series.RELEASES] = _releases_text(
      patches, item, _sha256(git, start, read)
  ).encode()
  written, removed = _write(files)
  return Exported(
      release=item.release,
      slugs=tuple(patch.slug for patch in read),
      written=tuple(str(path.relative_to(patches)) for path in written),
      removed=tuple(str(path.relative_to(patches)) for path in removed),
  )


def _base(git: git_lib.Git, release: series.Release, base: str | None) -> str:
  name = f"refs/tags/{release.tag}" if base is None else base
  result = git.run("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
  commit = result.stdout.decode("ascii", "replace").strip()
  found = not result.returncode
  below = found and not git.run(
      "merge-base", "--is-ancestor", commit, "HEAD"
  ).returncode
  if base is not None:
    if not found:
      raise problems.PatchError(f"{git.folder} has no commit {base}")
    if not below:
      raise problems.PatchError(f"{base} is not below HEAD in {git.folder}")
    _require_release(git, commit, release, "is not JAX {}: {} differs")
    return commit
  if below:
    return commit
  log = git.out(
      "log", "--first-parent", "--max-count=1000", "-z",
      "--format=%H%x01%(trailers:key=Hook,valueonly)", "HEAD",
  )
  for entry in log.decode("utf-8", "replace").split("\0"):
    commit, _, hook = entry.strip("\n").partition("\x01")
    if not hook.strip():
      _require_release(
          git, commit, release,
          "has no trailer 'Hook: ', and is not JAX {} either: {} differs; name"
          " the base",
      )
      return commit
  raise problems.PatchError(f"{git.folder} has nothing below the patches")


def _require_release(git, commit, release, text) -> None:
  """Refuses a commit that is not the release; `text` takes release and file."""
  for path, expected in release.sha256.items():
    data = git.run("cat-file", "blob", f"{commit}:{path}").stdout
    if hashlib.sha256(data).hexdigest() != expected:
      subject = git.line("show", "--no-patch", "--format=%s", commit)
      raise problems.PatchError(
          f"commit {commit[:12]} ({subject})"
          f" {text.format(release.release, path)}"
      )


def _patch(data: bytes, commit: str) -> mail.Patch:
  try:
    patch = mail.parse(data, _UNNAMED)
  except problems.PatchError as e:
    raise problems.PatchError(f"commit {commit[:12]}: {e}") from e
  slug = legal.named_slug(patch)
  if slug:
    patch = dataclasses.replace(patch, name=f"{slug}.patch")
  elif patch.values("Hook") and ": " not in patch.subject:
    raise problems.PatchError(
        f"commit {commit[:12]} ({patch.subject}) has no hook, so its subject"
        " must begin with '<slug>: '"
    )
  for text in legal.faults(patch):
    raise problems.PatchError(f"commit {commit[:12]} ({patch.subject}) {text}")
  return patch


def _sha256(git, start, patches) -> dict[str, str]:
  found = {}
  for path in series.base_paths(patches):
    data = git.out("cat-file", "blob", f"{start}:{path}")
    found[path] = hashlib.sha256(data).hexdigest()
  return found


def _series_text(release: series.Release, names: Sequence[str]) -> str:
  """Returns the series file, as it is if it names the same in that order."""
  path = release.folder / series.SERIES
  if not path.is_file():
    return "".join(f"{name}\n" for name in names)
  text = path.read_text(encoding="utf-8")
  if series.read_order(release) == list(names):
    return text
  # A comment goes with the name below it; those above a blank line stay first.
  head, comments, block = "", {}, ""
  for line in text.splitlines(keepends=True):
    stripped = line.strip()
    if stripped and not stripped.startswith("#"):
      comments[stripped] = block
      block = ""
    else:
      block += line
      if not stripped and not comments:
        head, block = head + block, ""
  lines = [f"{comments.get(name, '')}{name}\n" for name in names]
  return head + "".join(lines) + block


def _releases_text(
    patches: pathlib.Path, release: series.Release, sums: Mapping[str, str]
) -> str:
  """Returns `releases.toml` with the table of one release's files replaced."""
  text = (patches / series.RELEASES).read_text(encoding="utf-8")
  if dict(release.sha256) == dict(sums):
    return text
  header = f'["{release.name}".sha256]\n'
  table = header + "".join(f'"{p}" = "{s}"\n' for p, s in sorted(sums.items()))
  old = re.search(
      rf"^{re.escape(header)}(?:[^\[\n].*\n|\n(?!\[))*", text, re.MULTILINE
  )
  if old:
    return text[: old.start()] + table + text[old.end() :]
  own = re.search(
      rf'^\["{re.escape(release.name)}"\]\n(?:[^\[\n].*\n)*', text, re.MULTILINE
  )
  if not own or release.sha256:
    raise problems.PatchError(
        f'{patches / series.RELEASES}: write ["{release.name}"] and'
        f" {header[:-1]} as lines of their own"
    )
  return f"{text[: own.end()]}\n{table}{text[own.end() :]}"


def _write(files: Mapping[pathlib.Path, bytes | None]):
  """Writes files, None for those to remove; all of them or none."""
  before = {p: p.read_bytes() if p.is_file() else None for p in files}
  changed = [path for path, data in files.items() if data != before[path]]
  made = [f for f in {path.parent for path in changed} if not f.exists()]
  current = None
  try:
    for current in changed:
      _replace(current, files[current])
  except BaseException as e:
    with git_lib.deferred_interrupts():
      for path in changed:
        if (path.read_bytes() if path.is_file() else None) != before[path]:
          _replace(path, before[path])
      for folder in made:
        if folder.exists():
          folder.rmdir()
    if isinstance(e, OSError):
      raise problems.PatchError(
          f"cannot write {current}: {problems.os_reason(e)}"
      ) from e
    raise
  written = [path for path in changed if files[path] is not None]
  return written, [path for path in changed if files[path] is None]


def _replace(path: pathlib.Path, data: bytes | None) -> None:
  """Writes a file in one step, so that no reader ever sees half of it."""
  if data is None:
    path.unlink(missing_ok=True)
    return
  path.parent.mkdir(exist_ok=True)
  handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
  try:
    with os.fdopen(handle, "wb") as file:
      file.write(data)
    os.chmod(name, 0o644)
    os.replace(name, path)
  except BaseException:
    os.unlink(name)
    raise
