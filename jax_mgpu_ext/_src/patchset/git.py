"""Runs git, the same on every machine: no configuration of the user counts."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import functools
import os
import pathlib
import re
import shutil
import signal
import subprocess
import threading

from jax_mgpu_ext._src.patchset import problems

# The first git that can be told to ignore the user's configuration, by
# GIT_CONFIG_GLOBAL.
MINIMUM = (2, 32)

_DATE = "2000-01-01T00:00:00+0000"
# What a repository's own configuration could say otherwise.
_SETTINGS = {
    "am.keepcr": "false",
    "am.messageid": "false",
    "am.threeWay": "false",
    "apply.ignoreWhitespace": "no",
    "apply.whitespace": "nowarn",
    "commit.gpgSign": "false",
    "core.attributesFile": os.devnull,
    "core.autocrlf": "false",
    "core.excludesFile": os.devnull,
    "core.fsmonitor": "false",
    "core.hooksPath": os.devnull,
    "core.quotePath": "false",
    "core.safecrlf": "false",
    "diff.renames": "false",
    "gc.auto": "0",
    "i18n.commitEncoding": "UTF-8",
    "i18n.logOutputEncoding": "UTF-8",
    "mailinfo.scissors": "false",
    "maintenance.auto": "false",
    "merge.conflictStyle": "diff3",
    "rerere.enabled": "false",
}


class Git:
  """git in one folder.

  Attributes:
    folder: Where it runs.
  """

  def __init__(
      self, folder: pathlib.Path, *, alternates: pathlib.Path | None = None
  ):
    """Looks for git.

    Args:
      folder: Where it runs.
      alternates: A folder with objects of another repository to read too.

    Raises:
      PatchError: git is missing or too old.
    """
    self.folder = folder
    self._program = _find()
    self._env = _environment()
    if alternates is not None:
      self._env["GIT_ALTERNATE_OBJECT_DIRECTORIES"] = str(alternates)

  def run(
      self, *args: str, stdin: bytes = b""
  ) -> subprocess.CompletedProcess[bytes]:
    """Runs a git command to its end, and returns how it went.

    A Ctrl-C is only seen afterwards: git that is killed on its way leaves lock
    files and half written trees.
    """
    settings = []
    for key, value in _SETTINGS.items():
      settings += ["-c", f"{key}={value}"]
    with deferred_interrupts():
      return subprocess.run(
          [self._program, "-C", str(self.folder), *settings, *args],
          input=stdin,
          capture_output=True,
          env=self._env,
          check=False,
          start_new_session=True,  # So that the terminal's Ctrl-C spares it.
      )

  def out(self, *args: str, stdin: bytes = b"") -> bytes:
    """Runs a git command, and returns what it prints.

    Raises:
      PatchError: It failed.
    """
    result = self.run(*args, stdin=stdin)
    if result.returncode:
      raise problems.PatchError(
          f"git {args[0]} failed in {self.folder}: {reason(result)}"
      )
    return result.stdout

  def line(self, *args: str) -> str:
    """As `out`, but as text without the end of the line."""
    return self.out(*args).decode("utf-8", "replace").rstrip("\n")


def reason(result: subprocess.CompletedProcess[bytes]) -> str:
  """Returns the line of git's output that says why it failed."""
  text = (result.stderr or result.stdout).decode("utf-8", "replace")
  lines = [line.strip() for line in text.split("\n") if line.strip()]
  for line in lines:
    if line.startswith(("fatal:", "error:")):
      return line.partition(": ")[2]
  return lines[0] if lines else f"exit status {result.returncode}"


@contextlib.contextmanager
def deferred_interrupts() -> Iterator[None]:
  """Lets the block run to its end; Ctrl-C and SIGTERM take effect after it."""
  if threading.current_thread() is not threading.main_thread():
    yield  # Signals never reach other threads.
    return
  seen = []
  previous = {
      number: signal.signal(number, lambda number, _: seen.append(number))
      for number in (signal.SIGINT, signal.SIGTERM)
  }
  try:
    yield
  finally:
    for number, handler in previous.items():
      signal.signal(number, handler)
    if seen:
      signal.raise_signal(seen[0])


def _find() -> str:
  program = shutil.which("git")
  if program is None:
    raise problems.PatchError(
        "git is not on the PATH; the patch tool needs git"
        f" {MINIMUM[0]}.{MINIMUM[1]} or later"
    )
  _require_recent(program)
  return program


@functools.cache
def _require_recent(program: str) -> None:
  result = subprocess.run(
      [program, "--version"], capture_output=True, text=True, check=False
  )
  match = re.search(r"(\d+)\.(\d+)", result.stdout)
  if not match or tuple(map(int, match.groups())) < MINIMUM:
    raise problems.PatchError(
        f"expected git {MINIMUM[0]}.{MINIMUM[1]} or later, got"
        f" {result.stdout.strip() or 'no version'!r} from {program}"
    )


def _environment() -> dict[str, str]:
  # Inside a git hook, GIT_DIR and the like point to another repository.
  clean = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
  return {
      **clean,
      "LC_ALL": "C",
      "GIT_ATTR_NOSYSTEM": "1",
      "GIT_CONFIG_GLOBAL": os.devnull,
      "GIT_CONFIG_NOSYSTEM": "1",
      # Looking at a tree must not rewrite its index.
      "GIT_OPTIONAL_LOCKS": "0",
      "GIT_TERMINAL_PROMPT": "0",
      "GIT_AUTHOR_NAME": "jax-mgpu-ext",
      "GIT_AUTHOR_EMAIL": "jax-mgpu-ext@localhost",
      "GIT_AUTHOR_DATE": _DATE,
      "GIT_COMMITTER_NAME": "jax-mgpu-ext",
      "GIT_COMMITTER_EMAIL": "jax-mgpu-ext@localhost",
      "GIT_COMMITTER_DATE": _DATE,
  }
