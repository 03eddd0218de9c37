"""The rules that every patch keeps; `docs/patch-policy.md` says why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import re

from jax_mgpu_ext._src.patchset import mail

REASONS = ("temporary", "not-upstreamable", "by-design")
# Trailer -> what it holds, for messages; each occurs once.
TRAILERS = {
    "Hook": "jax_mgpu_ext._src.hooks.<slug>, or none (<why>)",
    "Reason": "one of " + ", ".join(REASONS),
    "Upstream": "a URL, or none (<why>)",
    "Remove-When": "what makes the patch unnecessary",
}
# What a patch may change. The second part is left out on an installed package.
SOURCES = "jax/"
TESTS = "tests/"

SLUG = re.compile(r"[a-z][a-z0-9_]*")
_HOOK = re.compile(r"jax_mgpu_ext\._src\.hooks\.([a-z][a-z0-9_]*)")
_NONE = re.compile(r"none \(\S.*\)")
_URL = re.compile(r"https?://\S+")
# A path inside a URL, or a relative one, has a character before it.
_ABSOLUTE = re.compile(r"(?<![\w./~:$})*-])/[A-Za-z][\w.-]*/[\w./-]+")
_NO_BLOB = "0" * 40


def hook_slug(patch: mail.Patch) -> str | None:
  """Returns the hook that a patch is the equivalent of, or None."""
  for value in patch.values("Hook"):
    match = _HOOK.fullmatch(value)
    if match:
      return match[1]
  return None


def named_slug(patch: mail.Patch) -> str | None:
  """Returns the slug that a patch's message gives it.

  It is that of the `Hook:` trailer. A patch without a hook has a subject that
  begins with its slug and a colon, as `kernel_grid: Do not reuse ...`.
  """
  slug = hook_slug(patch)
  if slug:
    return slug
  if not any(_NONE.fullmatch(value) for value in patch.values("Hook")):
    return None
  first = patch.subject.partition(":")[0]
  return first if SLUG.fullmatch(first) and first != patch.subject else None


def faults(patch: mail.Patch) -> Iterator[str]:
  """Yields every rule that one patch breaks, as text."""
  yield from _trailer_faults(patch)
  if not patch.why:
    yield "has no text between its subject and its trailers that says why"
  if patch.subject.startswith("["):
    yield f"has the subject {patch.subject!r}; git am drops what is in brackets"
  slug = named_slug(patch)
  if slug and slug != patch.slug:
    yield f"is named {slug} in its message; the file must be {slug}.patch"
  elif not slug and any(_NONE.fullmatch(v) for v in patch.values("Hook")):
    yield (
        f"has no hook, so its subject must begin with '{patch.slug}: ', got"
        f" {patch.subject!r}"
    )
  for change in patch.changes:
    parts = change.path.split("/")
    if not change.path.startswith((SOURCES, TESTS)) or ".." in parts:
      yield f"changes {change.path}; patches stay in {SOURCES} and {TESTS}"
  for number, line in patch.added:
    if line != line.rstrip():
      yield f"line {number}: an added line ends with white space"
    match = _ABSOLUTE.search(line)
    if match:
      yield f"line {number}: an absolute path, {match[0]}"
  match = _ABSOLUTE.search("\n".join((patch.subject, patch.why)))
  if match:
    yield f"its message has an absolute path, {match[0]}"


def _trailer_faults(patch: mail.Patch) -> Iterator[str]:
  for key, what in TRAILERS.items():
    values = patch.values(key)
    if not values:
      yield f"has no trailer '{key}: ' ({what})"
    elif len(values) > 1:
      yield f"has the trailer '{key}: ' {len(values)} times"
    elif not _is_legal(key, values[0]):
      yield f"expected {key}: {what}; got {key}: {values[0]}"


def _is_legal(key: str, value: str) -> bool:
  if key == "Hook":
    return bool(_HOOK.fullmatch(value) or _NONE.fullmatch(value))
  if key == "Reason":
    return value in REASONS
  if key == "Upstream":
    return bool(_URL.fullmatch(value) or _NONE.fullmatch(value))
  return bool(value)


def chain_faults(patches: Sequence[mail.Patch]) -> Iterator[tuple[str, str]]:
  """Yields (file name, text) where patches do not follow one another.

  Full ids tell which text a patch starts from, so this needs no sources.
  """
  seen: dict[str, tuple[str, str]] = {}  # Path -> the id it has, since when.
  for patch in patches:
    for change in patch.changes:
      path = change.path
      if path in seen and seen[path][0] != change.old:
        yield patch.name, (
            f"starts from another {path} than {seen[path][1]} leaves; was one"
            " of them edited by hand, or the order changed?"
        )
      elif path not in seen and path.startswith(TESTS) and change.kind != "add":
        yield patch.name, (
            f"changes {path}, which no patch before it adds; an installed"
            " package has no such file"
        )
      has_old, has_new = change.old != _NO_BLOB, change.new != _NO_BLOB
      if (has_old, has_new) != {
          "add": (False, True), "delete": (True, False), "modify": (True, True)
      }[change.kind]:
        yield patch.name, f"the index line of {path} does not go with its mode"
      seen[path] = change.new, patch.name
