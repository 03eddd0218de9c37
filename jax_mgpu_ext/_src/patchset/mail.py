"""Reads a patch file: one commit in the form of `git format-patch`.

The reader is strict. What git would forgive in a patch that was edited by hand
(a count that is wrong, a context line that lost its space) is an error here.
"""

from __future__ import annotations

import dataclasses
import email
import email.policy
import re

from jax_mgpu_ext._src.patchset import problems

# With `--zero-commit`, so that the same change is the same bytes everywhere.
FIRST_LINE = f"From {'0' * 40} Mon Sep 17 00:00:00 2001"

_DIFF = re.compile(r"diff --git a/(?P<old>\S+) b/(?P<new>\S+)")
_INDEX = re.compile(r"index ([0-9a-f]{40})\.\.([0-9a-f]{40})(?: (\d{6}))?")
_HUNK = re.compile(r"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@.*")
_TRAILER = re.compile(r"([A-Z][A-Za-z]*(?:-[A-Za-z]+)*): (.*)")
_BAD_HEADERS = (
    "old mode", "new mode", "rename ", "copy ", "similarity ",
    "GIT binary patch", "Binary files",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileChange:
  """What a patch does to one file.

  Attributes:
    path: As `jax/_src/pallas/core.py`.
    kind: `modify`, `add` or `delete`.
    old: git's id of the text before, zeros if there is none.
    new: git's id of the text after, zeros if there is none.
    mode: git's mode of the file, as `100644`.
    hunks: The `@@` lines.
  """

  path: str
  kind: str
  old: str
  new: str
  mode: str
  hunks: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Patch:
  """A patch file.

  Attributes:
    name: The file's name, as `ref_unions.patch`.
    data: The whole file.
    subject: The first line of the commit message.
    why: The message between subject and trailers.
    trailers: The last paragraph of the message, as (key, value).
    changes: File by file.
    added: Number in the patch file and text of every added line.
  """

  name: str
  data: bytes
  subject: str
  why: str
  trailers: tuple[tuple[str, str], ...]
  changes: tuple[FileChange, ...]
  added: tuple[tuple[int, str], ...]

  @property
  def slug(self) -> str:
    """What the file's name says; see `legal.named_slug` for the message."""
    return self.name.removesuffix(".patch")

  def values(self, key: str) -> list[str]:
    """Returns the values of all trailers of that name."""
    return [value for name, value in self.trailers if name == key]


def parse(data: bytes, name: str) -> Patch:
  """Reads a patch.

  Args:
    data: The content of the file.
    name: The name of the file, for messages.

  Raises:
    PatchError: It is not a patch in this form; the text says which line.
  """
  text = _decode(data, name)
  message, separator, _ = text.partition("\ndiff --git ")
  if not separator:
    raise problems.PatchError(f"{name} has no diff")
  if not text.startswith(FIRST_LINE + "\n"):
    raise problems.PatchError(
        f"{name} does not begin with {FIRST_LINE!r}; export it again"
    )
  header, _, body = message.partition("\n\n")
  parsed = email.message_from_string(
      header.partition("\n")[2] + "\n\n", policy=email.policy.default
  )
  for field in ("From", "Date", "Subject"):
    if not parsed[field]:
      raise problems.PatchError(f"{name} has no header {field!r}")
  why, trailers = _split_body(body)
  changes, added = _Diff(name, text, message.count("\n") + 1).read()
  return Patch(
      name=name,
      data=data,
      subject=str(parsed["Subject"]),
      why=why,
      trailers=trailers,
      changes=changes,
      added=added,
  )


def _decode(data: bytes, name: str) -> str:
  try:
    text = data.decode("utf-8")
  except UnicodeDecodeError:
    text = "\0"
  if "\0" in text:
    raise problems.PatchError(f"{name} is not a text file in UTF-8")
  if "\r" in text:
    number = text.count("\n", 0, text.index("\r")) + 1
    raise problems.PatchError(
        f"{name} has a CRLF line end in line {number}; patches have LF"
    )
  if not text.endswith("\n"):
    raise problems.PatchError(f"{name} is cut off: it does not end with a line")
  return text


def _split_body(body: str) -> tuple[str, tuple[tuple[str, str], ...]]:
  why, _, last = ("\n\n" + body.strip("\n")).rpartition("\n\n")
  trailers: list[tuple[str, str]] = []
  for line in last.split("\n"):
    match = _TRAILER.fullmatch(line)
    if match:
      trailers.append((match[1], match[2].strip()))
    elif trailers and line.startswith(" "):
      key, value = trailers[-1]
      trailers[-1] = key, f"{value} {line.strip()}"
    else:
      return body.strip(), ()
  return why.strip(), tuple(trailers)


class _Diff:
  """Reads the part of a patch from the first `diff --git` on."""

  def __init__(self, name: str, text: str, start: int):
    self._name = name
    self._lines = text.split("\n")[:-1]
    self._at = start  # The index of the line that comes next.
    self._added: list[tuple[int, str]] = []

  def read(self):
    changes = []
    while self._at < len(self._lines):
      changes.append(self._file())
    paths = [change.path for change in changes]
    for path in paths:
      if paths.count(path) > 1:
        raise problems.PatchError(f"{self._name} changes {path} twice")
    return tuple(changes), tuple(self._added)

  def _error(self, text: str) -> problems.PatchError:
    # The index is that of the line after the one just read.
    return problems.PatchError(f"{self._name}, line {self._at}: {text}")

  def _next(self) -> str:
    self._at += 1
    if self._at > len(self._lines):
      raise self._error("the patch is cut off")
    return self._lines[self._at - 1]

  def _peek(self) -> str:
    return self._lines[self._at] if self._at < len(self._lines) else ""

  def _file(self) -> FileChange:
    match = _DIFF.fullmatch(self._next())
    if not match:
      raise self._error(
          "expected 'diff --git a/PATH b/PATH' or the next '@@', got"
          f" {self._lines[self._at - 1][:60]!r}; was it edited by hand?"
      )
    if match["old"] != match["new"]:
      raise self._error("a rename; patches delete and add instead")
    kind, mode = "modify", ""
    index = None
    while not index:
      line = self._next()
      if line.startswith(_BAD_HEADERS):
        raise self._error(f"{line!r} does not belong in a patch of this series")
      for start, word in (("new file", "add"), ("deleted file", "delete")):
        if line.startswith(f"{start} mode "):
          kind, mode = word, line[-6:]
      index = _INDEX.fullmatch(line)
      if line.startswith("index ") and not index:
        raise self._error("an index line without full ids (--full-index)")
      if line.startswith(("@@", "---", "diff ")):
        raise self._error("a file without its index line")
    if self._peek().startswith(_BAD_HEADERS):
      raise self._error("a binary file; patches hold text")
    hunks = []
    if self._peek().startswith("--- "):
      self._next()
      if not self._next().startswith("+++ "):
        raise self._error("expected '+++ b/PATH'")
      while self._peek().startswith("@@"):
        hunks.append(self._hunk())
    return FileChange(
        path=match["new"],
        kind=kind,
        old=index[1],
        new=index[2],
        mode=mode or index[3] or "100644",
        hunks=tuple(hunks),
    )

  def _hunk(self) -> str:
    header = self._next()
    match = _HUNK.fullmatch(header)
    if not match:
      raise self._error(f"expected '@@ -N,N +N,N @@', got {header[:60]!r}")
    left = int(match[1] if match[1] is not None else 1)
    right = int(match[2] if match[2] is not None else 1)
    while left > 0 or right > 0 or self._peek().startswith("\\"):
      line = self._next()
      if line[:1] not in ("+", "-", " ", "\\"):
        raise self._error(
            "expected a line of the hunk with '+', '-' or ' ' at its start,"
            f" got {line[:60]!r}; was it edited by hand?"
        )
      left -= line[0] in "- "
      right -= line[0] in "+ "
      if left < 0 or right < 0:
        raise self._error(
            "the hunk has other numbers of lines than its '@@' says; was it"
            " edited by hand?"
        )
      if line[0] == "+":
        self._added.append((self._at, line[1:]))
    return header
