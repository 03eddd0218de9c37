"""Reads the folder of patches: releases, series files, patches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import pathlib
import re
import tomllib
from typing import Any

from jax_mgpu_ext._src import hooks
from jax_mgpu_ext._src import releases
from jax_mgpu_ext._src.patchset import legal
from jax_mgpu_ext._src.patchset import mail
from jax_mgpu_ext._src.patchset import problems

RELEASES = "releases.toml"
SERIES = "series"
# Where a clone has them; an installed plugin has none, see `default_folder`.
DEFAULT = pathlib.Path(__file__).resolve().parents[3] / "patches"

_FOLDER = re.compile(r"jax-\d+(?:\.\d+)+")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Release:
  """A table of `releases.toml`.

  Attributes:
    name: The name of the table and of the folder, as `jax-0.12.0`.
    folder: The folder with the series.
    release: The release as in `_src/releases.py`, as `0.12.0.1`.
    tag: The tag of JAX's public repository, as `jax-v0.12.0`.
    wheel: The version on PyPI.
    sha256: Source file -> sha256 of its text before any patch.
  """

  name: str
  folder: pathlib.Path
  release: str
  tag: str
  wheel: str
  sha256: Mapping[str, str]


def default_folder() -> pathlib.Path:
  """Returns the clone's folder of patches, or that of the current folder."""
  here = pathlib.Path("patches")
  if not (DEFAULT / RELEASES).is_file() and (here / RELEASES).is_file():
    return here
  return DEFAULT


def read_releases(patches: pathlib.Path) -> dict[str, Release]:
  """Returns the releases that have a folder, by release, oldest first.

  Raises:
    PatchError: There is no such folder, or `releases.toml` is malformed.
  """
  path = patches / RELEASES
  try:
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
  except (OSError, UnicodeDecodeError) as e:
    raise problems.PatchError(
        f"expected the folder of patches with {RELEASES}, got {patches}"
        f" ({getattr(e, 'strerror', None) or e}); patches come with a clone of"
        " the repository: name its folder with --patches DIR"
    ) from e
  except tomllib.TOMLDecodeError as e:
    raise problems.PatchError(f"{path}: {e}") from e
  found = [_release(patches, name, table) for name, table in tables.items()]
  found.sort(key=lambda r: releases.key(r.release))
  by_release = {r.release: r for r in found}
  if len(by_release) != len(found):
    raise problems.PatchError(f"{path}: two tables are of one release")
  return by_release


def _release(patches: pathlib.Path, name: str, table: Any) -> Release:
  place = f"{patches / RELEASES}: table [{name}]"
  if not _FOLDER.fullmatch(name) or not isinstance(table, dict):
    raise problems.PatchError(
        f'{place}: expected a quoted name such as ["jax-0.12.0"]'
    )
  expected = {"release", "tag", "wheel"}
  if set(table) - {"sha256"} != expected or not all(
      isinstance(table[key], str) for key in expected
  ):
    raise problems.PatchError(
        f"{place}: expected the strings release, tag and wheel and a table"
        f" sha256, got {', '.join(table) or 'nothing'}"
    )
  sums = table.get("sha256", {})
  if not isinstance(sums, dict) or not all(
      re.fullmatch(r"[0-9a-f]{64}", str(value)) for value in sums.values()
  ):
    raise problems.PatchError(
        f"{place}: expected sha256 to map files to 64 hexadecimal digits"
    )
  return Release(
      name=name,
      folder=patches / name,
      release=table["release"],
      tag=table["tag"],
      wheel=table["wheel"],
      sha256=sums,
  )


def find_release(patches: pathlib.Path, name: str) -> Release:
  """Returns a release by its version, its tag or the name of its folder.

  Raises:
    PatchError: There are no patches for it.
  """
  known = read_releases(patches)
  for release in known.values():
    if name in (release.name, release.tag, release.wheel) or (
        releases.canonical(name) == release.release
    ):
      return release
  raise problems.PatchError(
      f"there are no patches for JAX {name}; there are for"
      f" {', '.join(known) or 'no release'}"
  )


def hook_slugs(release: str) -> tuple[str, ...]:
  """Returns the hooks that exist for a release, in the order of application."""
  found = []
  for slug in hooks.SLUGS:
    hook = hooks.load(slug)
    key = releases.key(release)
    if hook.since and key < releases.key(hook.since):
      continue
    if hook.until and key >= releases.key(hook.until):
      continue
    found.append(slug)
  return tuple(found)


def supported_hooks() -> dict[str, tuple[str, ...]]:
  """Returns the hooks of every supported release."""
  return {release: hook_slugs(release) for release in releases.SUPPORTED}


def read_order(release: Release) -> list[str]:
  """Returns the file names in a series file, as written.

  Raises:
    PatchError: There is no series file.
  """
  try:
    text = (release.folder / SERIES).read_text(encoding="utf-8")
  except (OSError, UnicodeDecodeError) as e:
    raise problems.PatchError(
        f"{release.name} has no readable file {SERIES!r}"
    ) from e
  lines = (line.strip() for line in text.splitlines())
  return [line for line in lines if line and not line.startswith("#")]


def inspect(
    release: Release,
) -> tuple[tuple[mail.Patch, ...], list[problems.Problem]]:
  """Reads a series, and finds all that can be wrong with it by itself.

  Returns:
    The patches that could be read, in order, and the problems.
  """
  found: list[problems.Problem] = []

  def add(file: str, text: str):
    found.append(problems.Problem(release=release.name, file=file, text=text))

  try:
    order = read_order(release)
  except problems.PatchError as e:
    return (), [problems.Problem(release=release.name, text=str(e))]
  patches = []
  for position, name in enumerate(order):
    if not legal.SLUG.fullmatch(name.removesuffix(".patch")) or (
        not name.endswith(".patch")
    ):
      add(SERIES, f"expected <slug>.patch, got {name!r}")
    elif name in order[:position]:
      add(SERIES, f"names {name} twice")
    elif not (release.folder / name).is_file():
      add(SERIES, f"names {name}, and there is no such file")
    else:
      try:
        patches.append(mail.parse((release.folder / name).read_bytes(), name))
      except problems.PatchError as e:
        found.append(_unreadable(release, name, e))
  for path in sorted(release.folder.iterdir()):
    if path.name not in (SERIES, *order):
      add(path.name, f"is not named in {SERIES}")
  for patch in patches:
    for text in legal.faults(patch):
      add(patch.name, text)
  for name, text in legal.chain_faults(patches):
    add(name, text)
  return tuple(patches), found


def _unreadable(release, name, error) -> problems.Problem:
  text = str(error).removeprefix(name).lstrip(" ,")
  return problems.Problem(release=release.name, file=name, text=text)


def load(release: Release) -> tuple[mail.Patch, ...]:
  """Returns the patches of a release, in order.

  Raises:
    PatchError: Anything is wrong with them.
  """
  patches, found = inspect(release)
  if found:
    more = f" (and {len(found) - 1} more; see check)" if len(found) > 1 else ""
    raise problems.PatchError(f"{found[0]}{more}")
  if not patches:
    raise problems.PatchError(f"{release.name}/{SERIES} names no patch")
  return patches


def base_paths(patches: Sequence[mail.Patch]) -> tuple[str, ...]:
  """Returns the files of JAX that a series changes, without those it adds."""
  first: dict[str, str] = {}
  for patch in patches:
    for change in patch.changes:
      first.setdefault(change.path, change.kind)
  return tuple(sorted(path for path, kind in first.items() if kind != "add"))
