"""`status` and `check`: what there is, and whether it is as it should be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import pathlib

from jax_mgpu_ext._src.patchset import legal
from jax_mgpu_ext._src.patchset import problems
from jax_mgpu_ext._src.patchset import series
from jax_mgpu_ext._src.patchset import sources
from jax_mgpu_ext._src.patchset import workspace as workspace_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class PatchStatus:
  """One slug in one release.

  Attributes:
    release: The JAX release, as `0.12.0.1`.
    slug: The hook's or the patch's name.
    hook: Whether there is such a hook for the release.
    patch: Whether the series has such a patch.
    reason: The patch's `Reason:`, empty without a patch.
    upstream: The patch's `Upstream:`, empty without a patch.
    problem: Why the patch cannot be read, empty if it can.
  """

  release: str
  slug: str
  hook: bool
  patch: bool
  reason: str = ""
  upstream: str = ""
  problem: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckReport:
  """What `check` has found.

  Attributes:
    problems: All that is wrong.
    notes: What could not be checked here, and why.
    checked: The folders that were looked at.
    applied: Those of them whose series was applied to real sources too.
  """

  problems: tuple[problems.Problem, ...]
  notes: tuple[str, ...]
  checked: tuple[str, ...]
  applied: tuple[str, ...]


@problems.reports_os_errors
def status(
    patches: pathlib.Path | None = None,
    *,
    slugs: Mapping[str, Sequence[str]] | None = None,
) -> list[PatchStatus]:
  """Returns what there is of each slug in each release.

  Args:
    patches: The folder of patches; by default that of the clone.
    slugs: Release -> its hooks; by default those of every supported release.

  Raises:
    PatchError: `releases.toml` is missing or malformed.
  """
  known = series.read_releases(patches or series.default_folder())
  slugs = series.supported_hooks() if slugs is None else slugs
  rows = []
  for release in dict.fromkeys((*slugs, *known)):
    hooks = tuple(slugs.get(release, ()))
    readable, broken = {}, {}
    if release in known:
      readable_patches, found = series.inspect(known[release])
      readable = {patch.slug: patch for patch in readable_patches}
      for problem in found:
        slug = problem.file.removesuffix(".patch")
        if problem.file.endswith(".patch"):
          broken.setdefault(slug, problem.text)
    for slug in dict.fromkeys((*hooks, *readable, *broken)):
      patch = readable.get(slug)
      rows.append(PatchStatus(
          release=release,
          slug=slug,
          hook=slug in hooks,
          patch=bool(patch) or slug in broken,
          reason=", ".join(patch.values("Reason")) if patch else "",
          upstream=", ".join(patch.values("Upstream")) if patch else "",
          problem=broken.get(slug, ""),
      ))
  return rows


@problems.reports_os_errors
def check(
    patches: pathlib.Path | None = None,
    *,
    release: str | None = None,
    root: pathlib.Path | None = None,
    slugs: Mapping[str, Sequence[str]] | None = None,
) -> CheckReport:
  """Checks the series: by themselves, against the hooks, against JAX's sources.

  Args:
    patches: The folder of patches; by default that of the clone.
    release: The only release to check; by default all that are supported.
    root: A folder that holds the package `jax`; by default the installed one.
      A series is applied to it if it is that release.
    slugs: Release -> its hooks; by default those of every supported release.

  Raises:
    PatchError: `releases.toml` is missing or malformed, the release is unknown,
      or git is missing.
  """
  patches = patches or series.default_folder()
  known = series.read_releases(patches)
  slugs = series.supported_hooks() if slugs is None else slugs
  if release is not None:
    only = series.find_release(patches, release)
    known, slugs = {only.release: only}, {
        r: s for r, s in slugs.items() if r == only.release
    }
  root = root or sources.installed_root()
  version = sources.version_of(root)
  found: list[problems.Problem] = []
  notes, applied = [], []
  for name in slugs:
    if name not in known:
      found.append(problems.Problem(
          release=series.RELEASES, text=f"has no table for JAX {name}"
      ))
  if release is None:
    found += _strays(patches, known)
  for item in known.values():
    read, of_series = series.inspect(item)
    found += of_series
    if item.release not in slugs:
      text = f"JAX {item.release} is not a supported release"
      found.append(problems.Problem(release=item.name, text=text))
    found += _hook_problems(item, read, slugs.get(item.release, ()))
    found += _sha256_problems(item, read)
    if item.release != version:
      notes.append(
          f"{item.name}: not applied, since {root} is JAX {version}"
      )
    elif of_series:
      notes.append(f"{item.name}: not applied, since its files have problems")
    else:
      found += _application_problems(item, read, root)
      applied.append(item.name)
  return CheckReport(
      problems=tuple(found),
      notes=tuple(notes),
      checked=tuple(item.name for item in known.values()),
      applied=tuple(applied),
  )


def _strays(patches, known):
  expected = {series.RELEASES, *(item.name for item in known.values())}
  for path in sorted(patches.iterdir()):
    if path.name not in expected:
      yield problems.Problem(
          release=path.name, text=f"has no table in {series.RELEASES}"
      )


def _hook_problems(release, patches, hooks):
  files = {path.stem for path in release.folder.glob("*.patch")}
  for slug in hooks:
    if slug not in files:
      yield problems.Problem(
          release=release.name,
          text=f"has no {slug}.patch, and there is a hook of that name",
      )
  for patch in patches:
    slug = legal.hook_slug(patch)
    if slug and slug not in hooks:
      yield problems.Problem(
          release=release.name,
          file=patch.name,
          text=f"names a hook that JAX {release.release} does not have",
      )


def _sha256_problems(release, patches):
  needed = series.base_paths(patches)
  for path in sorted({*needed, *release.sha256}):
    if path in needed and path in release.sha256:
      continue
    yield problems.Problem(
        release=series.RELEASES,
        text=(
            f"{release.name} lacks the sha256 of {path}"
            if path in needed
            else f"{release.name} has the sha256 of {path}, which no patch"
            " changes"
        ),
    )


def _application_problems(release, patches, root):
  """Applies a series to real sources, in a temporary repository."""
  try:
    sources.require_unpatched(release, patches, root)
  except problems.PatchError as e:
    yield problems.Problem(release=release.name, text=str(e))
    return
  with workspace_lib.temporary() as workspace:
    workspace.commit(workspace_lib.base_files(patches, root), "base")
    yield from workspace_lib.replay(workspace, release, patches)
