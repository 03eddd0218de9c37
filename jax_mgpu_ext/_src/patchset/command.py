"""The command line of `tools/patchset.py`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
import contextlib
import pathlib
import shlex
import signal
import sys
import threading

from jax_mgpu_ext._src.patchset import applying
from jax_mgpu_ext._src.patchset import checking
from jax_mgpu_ext._src.patchset import exporting
from jax_mgpu_ext._src.patchset import overlaying
from jax_mgpu_ext._src.patchset import problems
from jax_mgpu_ext._src.patchset import rebasing


class _Parser(argparse.ArgumentParser):
  """Says what is wrong in one line, without the usage."""

  def error(self, message: str):
    self.exit(2, f"{self.prog}: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
  """Runs a command.

  Args:
    argv: The arguments, by default those of the process.

  Returns:
    0 if all is well, 1 if there are problems or a conflict, 2 for bad input.
  """
  args = _parser().parse_args(argv)
  try:
    with _terminable():
      return args.function(args)
  except problems.PatchError as e:
    message, status = str(e), 2
  except KeyboardInterrupt:
    message, status = "interrupted; nothing was changed", 130
  print(f"patchset: {' '.join(message.split())}", file=sys.stderr)
  return status


@contextlib.contextmanager
def _terminable():
  """Makes SIGTERM end the block as Ctrl-C does, so that it cleans up."""

  def interrupt(number, frame):
    raise KeyboardInterrupt

  if threading.current_thread() is not threading.main_thread():
    yield
    return
  previous = signal.signal(signal.SIGTERM, interrupt)
  try:
    yield
  finally:
    signal.signal(signal.SIGTERM, previous)


def _folder(text: str) -> pathlib.Path:
  """Reads a folder; Path would take an empty string for the current one."""
  return pathlib.Path(_text(text))


def _text(text: str) -> str:
  if not text:
    raise argparse.ArgumentTypeError("is empty")
  return text


def _parser() -> argparse.ArgumentParser:
  parser = _Parser(
      prog="patchset", description="Works on the patches against JAX."
  )
  patches_help = (
      "the folder of patches (default: that of this clone, or else ./patches)"
  )
  parser.add_argument(
      "--patches",
      type=_folder,
      metavar="DIR",
      help=patches_help,
  )
  commands = parser.add_subparsers(required=True, metavar="COMMAND")

  def add(name, function, text):
    command = commands.add_parser(name, help=text, description=text)
    command.set_defaults(function=function)
    command.add_argument(
        "--patches",
        type=_folder,
        metavar="DIR",
        default=argparse.SUPPRESS,  # What is said before the verb stays.
        help=patches_help,
    )
    return command

  def add_folder(command, option, text, required=False):
    command.add_argument(
        option, type=_folder, metavar="DIR", help=text, required=required
    )

  jax_help = "a folder that holds the package jax (default: the installed one)"

  add("status", _status, "shows hook and patch of each slug and release")
  command = add("check", _check, "checks the patches")
  command.add_argument("--release", type=_text, help="only this JAX release")
  add_folder(command, "--jax", jax_help)
  command = add("apply", _apply, "commits the patches to a git checkout of JAX")
  add_folder(command, "--tree", "the top of a git checkout", required=True)
  command.add_argument(
      "--release", type=_text, help="default: what the tree says it is"
  )
  command = add("overlay", _overlay, "makes a patched copy of installed JAX")
  add_folder(command, "--out", "an empty or new folder", required=True)
  add_folder(command, "--jax", jax_help)
  command = add("export", _export, "writes commits back to the patches")
  add_folder(command, "--tree", "the top of a git checkout", required=True)
  command.add_argument("--release", type=_text, required=True)
  command.add_argument(
      "--base", type=_text, help="the commit below the first patch"
  )
  command = add("rebase", _rebase, "applies a series to another release")
  command.add_argument("from_release", type=_text, metavar="FROM")
  command.add_argument("to_release", type=_text, metavar="TO")
  add_folder(
      command, "--out", "an empty or new folder, for a repository to work in",
      required=True,
  )
  add_folder(command, "--tree", "holds jax of release TO (default: installed)")
  add_folder(command, "--from-tree", "holds jax of release FROM, for merges")
  return parser


def _status(args) -> int:
  rows = [("JAX", "slug", "hook", "patch", "reason", "upstream")]
  for row in checking.status(args.patches):
    rows.append((
        row.release,
        row.slug,
        "yes" if row.hook else "no",
        "yes" if row.patch else "no",
        row.reason,
        row.problem or row.upstream,
    ))
  widths = [max(map(len, column)) for column in zip(*rows)]
  for row in rows:
    cells = (cell.ljust(width) for cell, width in zip(row, widths))
    print("  ".join(cells).rstrip())
  return 0


def _check(args) -> int:
  report = checking.check(args.patches, release=args.release, root=args.jax)
  for problem in report.problems:
    print(problem)
  for note in report.notes:
    print(f"note: {note}")
  count = len(report.problems)
  print(
      f"{', '.join(report.checked) or 'nothing'}:"
      f" {count or 'no'} problem{'' if count == 1 else 's'};"
      f" applied to sources: {', '.join(report.applied) or 'none'}"
  )
  if count:
    print(f"patchset: {report.problems[0]}", file=sys.stderr)
  return 1 if count else 0


def _apply(args) -> int:
  done = applying.apply(args.tree, args.patches, release=args.release)
  print(f"applied to {done.base[:12]}: {', '.join(done.slugs)}")
  return 0


def _overlay(args) -> int:
  done = overlaying.overlay(args.out, args.patches, root=args.jax)
  print(f"PYTHONPATH={shlex.quote(str(done.folder))}")
  return 0


def _export(args) -> int:
  done = exporting.export(
      args.tree, args.release, args.patches, base=args.base
  )
  for path in done.written:
    print(f"wrote {path}")
  for path in done.removed:
    print(f"removed {path}")
  if not done.written and not done.removed:
    print(f"nothing has changed: {', '.join(done.slugs)}")
  return 0


def _rebase(args) -> int:
  done = rebasing.rebase(
      args.from_release,
      args.to_release,
      args.out,
      args.patches,
      root=args.tree,
      from_root=args.from_tree,
  )
  folder = shlex.quote(str(done.folder))
  print(f"applied: {', '.join(done.applied) or 'none'}")
  if done.unneeded:
    print(f"not needed any more: {', '.join(done.unneeded)}")
  if done.conflict is None:
    print(
        f"next: tools/patchset.py export --tree {folder} --release"
        f" {done.release}"
    )
    return 0
  for place in done.conflict.places:
    print(f"conflict in {done.conflict.slug}: {place}")
  if not done.three_way:
    print("the texts that the series was made for are not here: --from-tree")
  print(f"not tried: {', '.join(done.remaining) or 'none'}")
  print(
      f"next: mend the files in {folder}, git add them, git am --continue; or,"
      " if the release has the change itself, git am --skip"
  )
  print(
      f"patchset: {done.conflict.slug} does not apply to JAX {done.release}; it"
      f" is left in {done.folder}",
      file=sys.stderr,
  )
  return 1
