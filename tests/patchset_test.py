"""The patch tool, on small trees and series that are made here."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import io
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized

from jax_mgpu_ext._src import hooks
from jax_mgpu_ext._src import patchset
from jax_mgpu_ext._src import releases
from jax_mgpu_ext._src.patchset import applying
from jax_mgpu_ext._src.patchset import exporting
from jax_mgpu_ext._src.patchset import git as git_lib
from jax_mgpu_ext._src.patchset import legal
from jax_mgpu_ext._src.patchset import overlaying
from jax_mgpu_ext._src.patchset import series
from jax_mgpu_ext._src.patchset import sources

_ROOT = pathlib.Path(__file__).resolve().parents[1]

_OLD_TABLE = """\
["jax-0.11.2"]
release = "0.11.2"
tag = "jax-v0.11.2"
wheel = "0.11.2"

"""
_TABLE = """\
["jax-0.12.0"]
release = "0.12.0.1"
tag = "jax-v0.12.0"
wheel = "0.12.0.1"
"""
_SLUGS = {"0.12.0.1": ("first", "second")}
_CORE = "jax/_src/core.py"
_MORE = "jax/_src/more.py"
_TEST = "tests/pallas/first_test.py"
# What `main` has to say on stderr: one line that begins so.
_ONE_LINE = r"\Apatchset: [^\n]+\n\Z"


def _functions(count: int) -> str:
  return "".join(
      f"def f{n}():\n  a = {n}\n  b = a\n  return b\n\n\n" for n in range(count)
  )


def _message(subject, hook="none (it is a backport)", **trailers) -> str:
  values = {
      "Reason": "temporary",
      "Upstream": "none (not sent yet)",
      "Remove-When": "JAX does so itself",
      **trailers,
  }
  lines = [f"{key}: {value}\n" for key, value in values.items()]
  return f"{subject}\n\nSince it is better.\n\nHook: {hook}\n{''.join(lines)}"


def _write(root: pathlib.Path, files: dict[str, str]) -> None:
  for name, text in files.items():
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode())


def _make_jax(root: pathlib.Path, version: str = "0.12.0.1", core="") -> None:
  _write(root, {
      "jax/__init__.py": "from jax.version import __version__\n",
      "jax/version.py": f'_version = "{version}"\n__version__ = _version\n',
      "jax/_src/__init__.py": "",
      "jax/__pycache__/stale.pyc": "",
      _CORE: core or _functions(12),
      _MORE: "x = 1\ny = 2\n",
  })


def _edit(path: pathlib.Path, old: str, new: str) -> None:
  text = path.read_bytes()
  assert old.encode() in text, old
  path.write_bytes(text.replace(old.encode(), new.encode(), 1))


def _git(folder: pathlib.Path, *args: str) -> str:
  return git_lib.Git(folder).line(*args)


def _commit(tree: pathlib.Path, message: str) -> None:
  _git(tree, "add", "--all")
  _git(tree, "commit", "--quiet", "-m", message)


def _commit_patches(tree: pathlib.Path) -> None:
  """Makes the three changes that the tests are about."""
  _edit(tree / _CORE, "a = 3\n", "a = 30\n")
  _write(tree, {_TEST: "def test():\n  pass\n"})
  _commit(tree, _message(
      "mgpu: Make three more than it is, with a subject that is long enough",
      "jax_mgpu_ext._src.hooks.first",
      Upstream="https://example.com/pull/1",
  ))
  _edit(tree / _CORE, "a = 8\n", "a = 80  # Größer.\n")
  _edit(tree / _MORE, "y = 2\n", "y = 3\n")
  _commit(tree, _message("mgpu: Größer", "jax_mgpu_ext._src.hooks.second"))
  _write(tree, {"jax/_src/new.py": "from jax._src import more\nz = more.y\n"})
  _write(tree, {_TEST: "def test():\n  assert True\n"})
  _commit(tree, _message("third: Add a module"))


def _snapshot(*folders: pathlib.Path, internals: bool = True) -> str:
  """Returns a hash of all files.

  Args:
    *folders: Folders.
    internals: Whether git's own files count, which remember past commits;
      otherwise, for each folder that is a checkout, what git says counts.
  """
  total = hashlib.sha256()
  for folder in folders:
    for path in sorted(folder.rglob("*")):
      relative = path.relative_to(folder)
      if internals or ".git" not in relative.parts:
        data = path.read_bytes() if path.is_file() else b""
        total.update(repr((str(relative), path.lstat().st_mode, data)).encode())
    if not internals and (folder / ".git").is_dir():
      git = git_lib.Git(folder)
      total.update(git.out("for-each-ref"))
      total.update(git.out("status", "--porcelain=2", "--branch"))
      state = folder / ".git" / "rebase-apply"
      total.update(repr(state.exists()).encode())
  return total.hexdigest()


class _TestCase(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls._made = cls.enterClassContext(tempfile.TemporaryDirectory())
    made = pathlib.Path(cls._made)
    _make_jax(made / "site")
    _make_jax(made / "tree")
    (made / "patches").mkdir()
    _write(made / "patches", {"releases.toml": f"# Tables.\n\n{_TABLE}"})
    _git(
        made / "tree", "init", "--quiet", "--template=", "--initial-branch=main"
    )
    _commit(made / "tree", "JAX")
    _git(made / "tree", "tag", "jax-v0.12.0")
    shutil.copytree(made / "tree", made / "patched")
    _commit_patches(made / "patched")
    for name in ("tree", "patched"):  # Every test makes a copy.
      _git(made / name, "repack", "-adq")
      _git(made / name, "prune-packed", "--quiet")
    patchset.export(made / "patched", "0.12.0", made / "patches")

  def setUp(self):
    super().setUp()
    folder = self.enterContext(tempfile.TemporaryDirectory())
    self.folder = pathlib.Path(folder).resolve() / "all"
    shutil.copytree(self._made, self.folder)
    self.patches = self.folder / "patches"
    self.series = self.patches / "jax-0.12.0"
    self.site = self.folder / "site"
    self.tree = self.folder / "tree"
    self.patched = self.folder / "patched"
    self.out = self.folder / "out"
    self.enterContext(
        mock.patch.object(sources, "installed_root", lambda: self.site)
    )
    self.enterContext(
        mock.patch.object(series, "supported_hooks", lambda: _SLUGS)
    )

  def run_main(self, *args):
    """Returns exit status, stdout and stderr of the command line."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
      try:
        status = patchset.main([f"--patches={self.patches}", *map(str, args)])
      except SystemExit as e:
        status = e.code
    return status, out.getvalue(), err.getvalue()

  def command(self, name: str) -> list[str]:
    """Returns a command that succeeds, unless something is spoiled."""
    return {
        "check": ["check"],
        "apply": ["apply", "--tree", self.tree],
        "overlay": ["overlay", "--out", self.out],
        "export": ["export", "--tree", self.patched, "--release", "0.12.0.1"],
    }[name]


class SeriesTest(_TestCase):

  def test_files(self):
    self.assertEqual(
        (self.series / "series").read_text("utf-8"),
        "first.patch\nsecond.patch\nthird.patch\n",
    )
    text = (self.series / "first.patch").read_text("utf-8")
    self.assertStartsWith(text, f"From {'0' * 40} Mon Sep 17 00:00:00 2001\n")
    self.assertIn("\nSubject: mgpu: Make three", text)
    release = series.find_release(self.patches, "0.12.0.1")
    self.assertEqual(set(release.sha256), {_CORE, _MORE})
    [first, second, third] = series.load(release)
    self.assertEndsWith(first.subject, "with a subject that is long enough")
    self.assertEqual(first.why, "Since it is better.")
    self.assertEqual(first.values("Upstream"), ["https://example.com/pull/1"])
    self.assertEqual(second.subject, "mgpu: Größer")
    self.assertEqual(third.slug, "third")
    self.assertEqual([c.kind for c in third.changes], ["add", "modify"])
    for name in ("0.12.0", "jax-0.12.0", "jax-v0.12.0"):
      self.assertEqual(series.find_release(self.patches, name), release)

  def test_plain_git_applies_it(self):
    for name in ("first", "second", "third"):
      subprocess.run(
          ["git", "apply", "-p1", "--include=jax/*",
           str(self.series / f"{name}.patch")],
          cwd=self.site, check=True, env={**os.environ, "GIT_DIR": "none"},
      )
    self.assertFalse((self.site / "tests").exists())
    self.assertEqual(
        (self.site / _CORE).read_bytes(), (self.patched / _CORE).read_bytes()
    )

  def test_the_hooks_of_each_release(self):
    for release in releases.SUPPORTED:
      found = series.hook_slugs(release)
      self.assertContainsSubset(("ref_unions", "cluster_axes"), found)
      self.assertContainsSubset(found, hooks.SLUGS)

  def test_status(self):
    rows = {row.slug: row for row in patchset.status(
        self.patches, slugs={"0.12.0.1": ("first", "second", "fourth")}
    )}
    self.assertEqual(list(rows), ["first", "second", "fourth", "third"])
    self.assertEqual(rows["first"], patchset.PatchStatus(
        release="0.12.0.1", slug="first", hook=True, patch=True,
        reason="temporary", upstream="https://example.com/pull/1",
    ))
    self.assertFalse(rows["fourth"].patch)
    self.assertFalse(rows["third"].hook)
    (self.series / "second.patch").write_bytes(b"\0")
    status, out, _ = self.run_main("status")
    self.assertEqual(status, 0)
    self.assertRegex(out, "second +yes +yes +is not a text file")

  def test_check(self):
    report = patchset.check(self.patches)
    self.assertEqual(report.problems, ())
    self.assertEqual(report.applied, ("jax-0.12.0",))
    self.assertEqual(self.run_main("check", "--release", "0.12.0")[0], 0)

  def test_check_of_a_release_that_is_not_installed(self):
    _edit(self.site / "jax/version.py", "0.12.0.1", "0.11.2")
    report = patchset.check(self.patches)
    self.assertEqual((report.problems, report.applied), ((), ()))
    self.assertIn("not applied", report.notes[0])


# Name, what is done to the series, and what the line must say.
_SPOILED = (
    ("edited", lambda t: _edit(t.series / "second.patch", "+y = 3", "+y = 4"),
     "second.patch: differs from its export in line .*edited by hand"),
    ("line_added", lambda t: _edit(
        t.series / "second.patch", "+y = 3\n", "+y = 3\n+z = 3\n"),
     "second.patch: .*edited by hand"),
    ("space_lost", lambda t: _edit(
        t.series / "first.patch", "\n \n", "\n\n"), "first.patch: .*by hand"),
    ("context_edited", lambda t: _edit(
        t.series / "second.patch", "\n x = 1\n", "\n x = 2\n"),
     "second.patch: does not apply"),
    ("other_base", lambda t: _edit(
        t.series / "second.patch", "\nindex ", "\nindex a"), "index line"),
    ("reordered", lambda t: _write(t.series, {
        "series": "second.patch\nfirst.patch\nthird.patch\n"}),
     "starts from another jax/_src/core.py"),
    ("missing_file", lambda t: (t.series / "third.patch").unlink(),
     "series: names third.patch, and there is no such file"),
    ("missing_series", lambda t: (t.series / "series").unlink(),
     "no readable file 'series'"),
    ("stray_file", lambda t: _write(t.series, {"other.patch": "x"}),
     "other.patch: is not named in series"),
    ("twice", lambda t: _write(t.series, {
        "series": "first.patch\n# Why.\nfirst.patch\n"}), "first.patch twice"),
    ("bad_name", lambda t: _write(t.series, {"series": "0001-First.patch\n"}),
     "expected <slug>.patch, got '0001-First.patch'"),
    ("crlf", lambda t: (t.series / "first.patch").write_bytes(
        (t.series / "first.patch").read_bytes().replace(b"\n", b"\r\n")),
     "first.patch: has a CRLF line end in line 1"),
    ("binary", lambda t: (t.series / "first.patch").write_bytes(
        bytes(range(256)) * 20), "first.patch: is not a text file"),
    ("empty", lambda t: (t.series / "first.patch").write_bytes(b""),
     "first.patch: is cut off"),
    ("cut_off", lambda t: (t.series / "first.patch").write_bytes(
        (t.series / "first.patch").read_bytes()[:-30] + b"\n"),
     "first.patch: "),
    ("no_trailer", lambda t: _edit(
        t.series / "first.patch", "Reason: temporary\n", ""),
     "no trailer 'Reason: ' .one of temporary, not-upstreamable, by-design"),
    ("trailer_twice", lambda t: _edit(
        t.series / "first.patch", "Reason:", "Reason: temporary\nReason:"),
     "the trailer 'Reason: ' 2 times"),
    ("bad_reason", lambda t: _edit(
        t.series / "first.patch", "temporary", "convenience"),
     "expected Reason: one of temporary.*got Reason: convenience"),
    ("bad_hook", lambda t: _edit(
        t.series / "first.patch", "jax_mgpu_ext._src.hooks.first", "first"),
     "expected Hook: jax_mgpu_ext._src.hooks.<slug>"),
    ("other_hook", lambda t: _edit(
        t.series / "first.patch", "hooks.first", "hooks.other"),
     "is named other in its message; the file must be other.patch"),
    ("bad_upstream", lambda t: _edit(
        t.series / "first.patch", "https://example.com/pull/1", "none"),
     "expected Upstream: a URL, or none"),
    ("no_remove_when", lambda t: _edit(
        t.series / "first.patch", "Remove-When: JAX does so itself\n", ""),
     "no trailer 'Remove-When: '"),
    ("no_slug", lambda t: _edit(
        t.series / "third.patch", "third: Add", "Add"),
     "subject must begin with 'third: '"),
    ("no_why", lambda t: _edit(
        t.series / "first.patch", "Since it is better.\n\n", ""), "says why"),
    ("white_space", lambda t: _edit(
        t.series / "second.patch", "+y = 3", "+y = 3 "),
     r"second.patch: line \d+: an added line ends with white space"),
    ("absolute_path", lambda t: _edit(
        t.series / "second.patch", "+y = 3", "+y = '/home/me/y'"),
     "absolute path, /home/me/y"),
    ("outside", lambda t: _edit(
        t.series / "second.patch",
        "diff --git a/jax/_src/more.py b/jax/_src/more.py",
        "diff --git a/setup.py b/setup.py"), "changes setup.py"),
    ("rename", lambda t: _edit(
        t.series / "second.patch", " b/jax/_src/more.py", " b/jax/other.py"),
     "a rename"),
    ("short_ids", lambda t: _edit(
        t.series / "third.patch", f"index {'0' * 40}", "index 0000"),
     "full ids"),
    ("upstream_test", lambda t: _edit(
        t.series / "series", "first.patch\n", ""), "which no patch before it"),
    ("no_patch", lambda t: _write(t.series, {"series": "# Nothing.\n"}),
     "first.patch: is not named"),
)


class SpoiledSeriesTest(_TestCase):
  """Each change makes `check` find it, and every other command refuse."""

  @parameterized.named_parameters(*_SPOILED)
  def test_spoiled(self, spoil, text):
    spoil(self)
    before = _snapshot(self.folder)
    status, out, err = self.run_main("check")
    self.assertEqual(status, 1, out + err)
    self.assertRegex(err, _ONE_LINE)
    self.assertRegex(out, text)
    for command in ("apply", "overlay"):
      status, out, err = self.run_main(*self.command(command))
      self.assertEqual((status, out), (2, ""), err)
      self.assertRegex(err, _ONE_LINE)
      if "more; see check" not in err:
        self.assertRegex(err, text)
    self.assertEqual(_snapshot(self.folder), before)

  @parameterized.named_parameters(
      ("no_patch", ("first", "second", "third_hook"),
       "jax-0.12.0: has no third_hook.patch"),
      ("no_hook", ("first",),
       "second.patch: names a hook that JAX 0.12.0.1 does not have"),
  )
  def test_hooks(self, slugs, text):
    report = patchset.check(self.patches, slugs={"0.12.0.1": slugs})
    [problem] = report.problems
    self.assertIn(text, str(problem))

  @parameterized.named_parameters(
      ("lacks", f'"{_MORE}" = ', '"jax/a.py" = ',
       f"lacks the sha256 of {_MORE}"),
      ("too_many", ".sha256]\n", f'.sha256]\n"jax/a.py" = "{"0" * 64}"\n',
       "jax/a.py, which no patch changes"),
      ("unsupported", '"0.12.0.1"\ntag', '"0.13.0"\ntag',
       "releases.toml: has no table for JAX 0.12.0.1"),
  )
  def test_releases_and_series(self, old, new, text):
    _edit(self.patches / "releases.toml", old, new)
    status, out, err = self.run_main("check")
    self.assertEqual(status, 1)
    self.assertRegex(err, _ONE_LINE)
    self.assertIn(text, out)

  def test_stray_folder(self):
    (self.patches / "jax-0.9.0").mkdir()
    [problem] = patchset.check(self.patches).problems
    self.assertIn("jax-0.9.0: has no table", str(problem))

  def test_sources_that_are_not_the_release(self):
    _edit(self.site / _CORE, "a = 3\n", "a = 4\n")
    [problem] = patchset.check(self.patches).problems
    self.assertIn(f"not JAX 0.12.0.1: {_CORE} has the sha256", str(problem))


def _half_patched(test):
  _git(test.tree, "am", "--quiet", str(test.series / "first.patch"))


def _other_release(test):
  _edit(test.tree / _CORE, "a = 5\n", "a = 6\n")
  _commit(test.tree, "Another")


def _in_the_middle(test):
  text = "From x\nSubject: x\n\ndiff --git a/x b/x\n"
  _write(test.folder, {"bad.patch": text})
  git_lib.Git(test.tree).run("am", str(test.folder / "bad.patch"))
  test.assertTrue((test.tree / ".git/rebase-apply").exists())


# Name, command, what is spoiled, and what the line must say.
_BAD_INPUT = (
    ("no_folder", "apply", lambda t: shutil.rmtree(t.tree), "no folder"),
    ("no_checkout", "apply", lambda t: shutil.rmtree(t.tree / ".git"),
     "is not a git checkout .*overlay"),
    ("below_top", "apply", lambda t: setattr(t, "tree", t.tree / "jax"),
     "not the top of a git checkout"),
    ("no_jax", "apply", lambda t: (
        shutil.rmtree(t.tree / "jax"), _commit(t.tree, "Gone")),
     "expected a folder with the package jax"),
    ("dirty", "apply", lambda t: _edit(t.tree / _MORE, "1", "2"),
     f"not committed: {_MORE}"),
    ("staged", "apply", lambda t: (
        _write(t.tree, {"staged.txt": ""}), _git(t.tree, "add", ".")),
     "not committed: staged.txt"),
    ("in_the_middle", "apply", _in_the_middle, "in the middle of another git"),
    ("wrong_tree", "apply", _other_release, "not JAX 0.12.0.1: .*core.py has"),
    ("half_patched", "apply", _half_patched,
     "is half patched: jax/_src/core.py has first.patch, "),
    ("patched", "apply", lambda t: setattr(t, "tree", t.patched),
     "has the whole series jax-0.12.0 already"),
    ("in_the_way", "apply",
     lambda t: _write(t.tree, {"jax/_src/new.py": "1\n"}),
     "has another jax/_src/new.py already"),
    ("broken_link", "apply",
     lambda t: (t.tree / "jax/_src/new.py").symlink_to("nowhere"),
     "has another jax/_src/new.py already, a link to nothing"),
    ("locked", "apply", lambda t: _write(t.tree, {".git/index.lock": ""}),
     "is locked by another git command: .*index.lock exists"),
    ("unknown_release", "apply", lambda t: (
        _edit(t.tree / "jax/version.py", "0.12.0.1", "0.13.0"),
        _commit(t.tree, "Later")),
     "no patches for JAX 0.13.0; there are for 0.12.0.1"),
    ("unknown_installed", "overlay", lambda t: _edit(
        t.site / "jax/version.py", "0.12.0.1", "0.13.0"),
     "no patches for JAX 0.13.0"),
    ("other_installed", "overlay", lambda t: _edit(t.site / _CORE, "5", "6"),
     "not JAX 0.12.0.1"),
    ("patched_installed", "overlay", lambda t: (
        shutil.rmtree(t.site / "jax"),
        shutil.copytree(t.patched / "jax", t.site / "jax")),
     "has the whole series"),
    ("not_empty", "overlay", lambda t: _write(t.out, {"notes.txt": "mine"}),
     "expected an empty or a new folder"),
    ("a_file", "overlay", lambda t: t.out.write_text("mine"),
     "expected an empty or a new folder"),
    ("no_parent", "overlay", lambda t: setattr(t, "out", t.out / "a" / "b"),
     "there is no folder"),
    ("beside_jax", "overlay", lambda t: setattr(t, "out", t.site / "out"),
     "where packages are installed"),
    ("in_jax", "overlay", lambda t: setattr(t, "out", t.site / "jax" / "out"),
     "where packages are installed"),
    ("site_packages", "overlay", lambda t: setattr(
        t, "out", pathlib.Path(absltest.__file__).parents[1] / "out"),
     "where packages are installed|folder of installed packages"),
    ("other_site_packages", "overlay", lambda t: (
        (t.folder / "site-packages").mkdir(),
        setattr(t, "out", t.folder / "site-packages" / "out")),
     "inside a folder of installed packages"),
    ("nothing_to_export", "export", lambda t: setattr(t, "patched", t.tree),
     "has no commit on top of"),
    ("dirty_export", "export", lambda t: _edit(t.patched / _MORE, "1", "2"),
     "not committed"),
    ("commit_without_trailers", "export", lambda t: (
        _edit(t.patched / _MORE, "1", "2"), _commit(t.patched, "Quick fix")),
     "commit .* .Quick fix. has no trailer 'Hook: '"),
    ("commit_without_slug", "export", lambda t: (
        _edit(t.patched / _MORE, "1", "2"),
        _commit(t.patched, _message("Quick fix"))),
     "subject must begin with '<slug>: '"),
    ("commit_of_the_same_slug", "export", lambda t: (
        _edit(t.patched / _MORE, "1", "2"),
        _commit(t.patched, _message("third: Again"))),
     "two commits would both be third.patch"),
    ("unmarked_below", "export", lambda t: (
        _git(t.patched, "tag", "--delete", "jax-v0.12.0"),
        _edit(t.patched / _MORE, "1", "2"), _commit(t.patched, "Quick fix")),
     "commit .* .Quick fix. has no trailer 'Hook: ', and is not JAX"),
    ("no_patches", "check", lambda t: setattr(t, "patches", t.folder / "none"),
     "expected the folder of patches"),
    ("no_toml", "check", lambda t: _write(t.patches, {"releases.toml": "= 1"}),
     "releases.toml: "),
    ("not_quoted", "check", lambda t: _write(
        t.patches, {"releases.toml": "[jax-0.12.0]\nrelease = '0.12.0'\n"}),
     r'expected a quoted name such as \["jax-0.12.0"\]'),
    ("no_tag", "check", lambda t: _edit(
        t.patches / "releases.toml", "tag = ", "label = "),
     "expected the strings"),
    ("bad_sum", "check", lambda t: _edit(
        t.patches / "releases.toml", f'"{_MORE}" = "', f'"{_MORE}" = "x'),
     "64 hexadecimal digits"),
    ("no_installed_jax", "check", lambda t: shutil.rmtree(t.site / "jax"),
     "expected a folder with the package jax"),
)


class BadInputTest(_TestCase):

  @parameterized.parameters("check", "apply", "overlay", "export")
  def test_good_input(self, command):
    status, out, err = self.run_main(*self.command(command))
    self.assertEqual((status, err), (0, ""), out)

  @parameterized.named_parameters(*_BAD_INPUT)
  def test_bad_input(self, command, spoil, text):
    spoil(self)
    before = _snapshot(self.folder)
    status, out, err = self.run_main(*self.command(command))
    self.assertEqual((status, out), (2, ""), err)
    self.assertRegex(err, _ONE_LINE)
    self.assertRegex(err, text)
    self.assertEqual(_snapshot(self.folder), before)

  @parameterized.parameters("check", "apply", "overlay", "export", "rebase")
  def test_missing_or_old_git(self, command):
    (self.folder / "bin").mkdir()
    before = _snapshot(self.folder)
    args = ["rebase", "0.12.0", "0.11.2", "--out", self.out]
    if command == "rebase":
      _edit(self.site / "jax/version.py", "0.12.0.1", "0.11.2")
      _edit(self.patches / "releases.toml", _TABLE, _OLD_TABLE + _TABLE)
    else:
      args = self.command(command)
    before = _snapshot(self.folder)
    with mock.patch.dict(os.environ, PATH=str(self.folder / "bin")):
      status, _, err = self.run_main(*args)
      self.assertEqual(status, 2)
      self.assertRegex(err, _ONE_LINE)
      self.assertIn("git is not on the PATH; ", err)
    with mock.patch.object(git_lib, "MINIMUM", (99, 0)):
      git_lib._require_recent.cache_clear()  # pylint: disable=protected-access
      status, _, err = self.run_main(*args)
      self.assertEqual(status, 2)
      self.assertRegex(err, "expected git 99.0 or later, got 'git version ")
    self.assertEqual(_snapshot(self.folder), before)
    self.assertEqual(self.run_main(*args)[0], 0)

  @parameterized.parameters(
      ("check --release 1.0", "no patches for JAX 1.0"),
      ("apply --release 1.0 --tree {tree}", "no patches for JAX 1.0"),
      ("export --release 1.0 --tree {patched}", "no patches for JAX 1.0"),
      ("export --release 0.12.0 --base no --tree {patched}", "no commit no"),
      ("export --release 0.12.0 --base HEAD~1 --tree {patched}",
       "is not JAX 0.12.0.1: jax/_src/core.py differs"),
      ("rebase 0.12.0 1.0 --out {out}", "no patches for JAX 1.0"),
      ("rebase 0.12.0 0.12.0.1 --out {out}", "expected two releases"),
      ("rebase 0.12.0 0.12.0.1", "required: --out"),
      ("apply", "required: --tree"),
      ("", "required: COMMAND"),
      ("frobnicate", "invalid choice"),
  )
  def test_bad_arguments(self, line, text):
    line = line.format(tree=self.tree, patched=self.patched, out=self.out)
    before = _snapshot(self.folder)
    status, _, err = self.run_main(*line.split())
    self.assertEqual(status, 2)
    self.assertEqual(err.count("\n"), 1, err)
    self.assertIn(text, err)
    self.assertEqual(_snapshot(self.folder), before)

  @parameterized.parameters(
      ("--tree", "apply", "--tree", ""),
      ("--release", "apply", "--tree", ".", "--release", ""),
      ("--out", "overlay", "--out", ""),
      ("--base", "export", "--tree", ".", "--release", "0.12.0", "--base", ""),
      ("--patches", "check", "--patches", ""),
  )
  def test_empty_arguments(self, option, *args):
    before = _snapshot(self.folder)
    status, out, err = self.run_main(*args)
    self.assertEqual((status, out), (2, ""))
    self.assertEqual(err, f"patchset {args[0]}: argument {option}: is empty\n")
    self.assertEqual(_snapshot(self.folder), before)

  def test_finds_the_patches(self):
    none = self.folder / "none"
    err = io.StringIO()
    with mock.patch.object(series, "DEFAULT", none):
      with contextlib.chdir(self.folder):
        self.assertEqual(patchset.check().problems, ())
      with contextlib.chdir(self.site):
        with contextlib.redirect_stderr(err):
          self.assertEqual(patchset.main(["status"]), 2)
        with contextlib.redirect_stdout(io.StringIO()):
          self.assertEqual(
              patchset.main(["status", "--patches", str(self.patches)]), 0
          )
    self.assertRegex(err.getvalue(), _ONE_LINE)
    self.assertIn("name its folder with --patches DIR", err.getvalue())

  def test_tool(self):
    result = subprocess.run(
        [sys.executable, str(_ROOT / "tools" / "patchset.py"),
         f"--patches={self.patches}", "check", f"--jax={self.site}"],
        capture_output=True, text=True, check=False,
    )
    self.assertEqual(result.returncode, 1, result.stderr)  # Other hooks.
    self.assertRegex(result.stderr, _ONE_LINE)


class ApplyTest(_TestCase):

  def test_makes_the_same_commits_everywhere(self):
    _write(self.tree, {"notes.txt": "Not git's business.\n"})
    shutil.copytree(self.tree, self.out)
    done = patchset.apply(self.tree, self.patches)
    self.assertEqual(done.slugs, ("first", "second", "third"))
    self.assertEqual(patchset.apply(self.out, self.patches).head, done.head)
    self.assertEqual(
        _git(self.tree, "rev-parse", "HEAD^{tree}"),
        _git(self.patched, "rev-parse", "HEAD^{tree}"),
    )
    self.assertEqual(_git(self.tree, "status", "--porcelain"), "?? notes.txt")
    self.assertEqual(_git(self.tree, "rev-parse", "HEAD~3"), done.base)

  def test_configurations_do_not_count(self):
    _write(self.folder, {
        "home/.gitconfig": (
            "[user]\n\tsigningkey = none\n[commit]\n\tgpgsign = true\n"
            "[core]\n\tautocrlf = true\n\thooksPath = home/hooks\n"
            "[format]\n\tsignOff = true\n\tattach = x\n[am]\n\tkeepcr = true\n"
            "[diff]\n\tnoprefix = true\n\tcontext = 9\n"
        ),
        "home/hooks/pre-applypatch": "#!/bin/sh\nexit 1\n",
        "tree/.git/hooks/applypatch-msg": "#!/bin/sh\nexit 1\n",
    })
    for name in ("home/hooks/pre-applypatch", "tree/.git/hooks/applypatch-msg"):
      (self.folder / name).chmod(0o755)
    local = (self.folder / "home/.gitconfig").read_text("utf-8")
    for tree in (self.tree, self.patched):
      with (tree / ".git/config").open("a", encoding="utf-8") as file:
        file.write(local)
      _write(tree, {".git/info/attributes": "*.py diff=python\n"})
    before = _snapshot(self.patches)
    environment = dict(
        HOME=str(self.folder / "home"), GIT_DIR="none", GIT_AUTHOR_NAME="X"
    )
    with mock.patch.dict(os.environ, environment):
      self.assertEqual(patchset.check(self.patches).problems, ())
      patchset.apply(self.tree, self.patches)
      for tree in (self.tree, self.patched):
        done = patchset.export(tree, "0.12.0", self.patches)
        self.assertEqual((done.written, done.removed), ((), ()))
    self.assertEqual(_snapshot(self.patches), before)

  @parameterized.named_parameters(
      ("by_ctrl_c", signal.SIGINT), ("by_sigterm", signal.SIGTERM)
  )
  def test_interrupted(self, number):
    before = _snapshot(self.folder, self.tree, internals=False)
    run = subprocess.run
    heads = []

    def interrupt(command, **kwargs):
      is_am = "am" in command and str(self.tree) in command
      if is_am and "--abort" not in command:
        os.kill(os.getpid(), number)
      result = run(command, **kwargs)
      if is_am:
        heads.append(run(
            ["git", "-C", str(self.tree), "rev-parse", "HEAD"],
            capture_output=True, check=True,
        ).stdout)
      return result

    with mock.patch.object(subprocess, "run", interrupt):
      status, out, err = self.run_main(*self.command("apply"))
    self.assertLen(heads, 1)  # git ran to its end first.
    self.assertEqual((status, out), (130, ""))
    self.assertIn("interrupted; nothing was changed", err)
    self.assertEqual(_snapshot(self.folder, self.tree, internals=False), before)

  def test_failure_in_the_middle(self):
    _edit(self.series / "second.patch", "\n x = 1\n", "\n x = 2\n")
    before = _snapshot(self.folder, self.tree, internals=False)
    with mock.patch.object(applying.workspace_lib, "require_replay"):
      with self.assertRaisesRegex(patchset.PatchError, "does not apply to"):
        patchset.apply(self.tree, self.patches)
    self.assertEqual(_snapshot(self.folder, self.tree, internals=False), before)

  def test_reports_why_it_failed(self):
    run = subprocess.run

    def lock(command, **kwargs):
      if str(self.tree) in command and "am" in command:
        _write(self.tree, {".git/index.lock": ""})
      return run(command, **kwargs)

    with mock.patch.object(subprocess, "run", lock):
      with self.assertRaises(patchset.PatchError) as caught:
        patchset.apply(self.tree, self.patches)
    self.assertIn("does not apply to", str(caught.exception))
    self.assertIn("index", str(caught.exception))
    self.assertNotIn("put back", str(caught.exception))  # Nothing has changed.
    (self.tree / ".git/index.lock").unlink()
    self.assertEmpty(_git(self.tree, "status", "--porcelain"))

    def lock_later(*args):
      _write(self.tree, {".git/index.lock": ""})
      raise patchset.PatchError("the first reason")

    with mock.patch.object(applying, "_require_final", lock_later):
      with self.assertRaisesRegex(
          patchset.PatchError,
          "the first reason; and .* could not be put back .*index.lock.*; run"
          " git reset --hard",
      ):
        patchset.apply(self.tree, self.patches)

  def test_failure_spares_what_was_there(self):
    link = self.tree / "jax/_src/new.py"
    link.symlink_to("nowhere")
    with mock.patch.object(applying.sources, "require_unpatched"):
      with self.assertRaisesRegex(patchset.PatchError, "does not apply to"):
        patchset.apply(self.tree, self.patches)
    self.assertTrue(link.is_symlink())


class OverlayTest(_TestCase):

  @parameterized.parameters(False, True)
  def test_patched_copy(self, exists):
    if exists:
      self.out.mkdir()
    before = _snapshot(self.site)
    status, out, _ = self.run_main(*self.command("overlay"))
    self.assertEqual((status, out), (0, f"PYTHONPATH={self.out}\n"))
    self.assertEqual([p.name for p in self.out.iterdir()], ["jax"])
    self.assertEmpty(list(self.out.rglob("__pycache__")))
    for name in (_CORE, _MORE, "jax/_src/new.py", "jax/version.py"):
      self.assertEqual(
          (self.out / name).read_bytes(), (self.patched / name).read_bytes()
      )
    self.assertEqual(_snapshot(self.site), before)
    # And it is known for what it is.
    with self.assertRaisesRegex(patchset.PatchError, "whole series"):
      patchset.overlay(self.folder / "o2", self.patches, root=self.out)

  @parameterized.parameters(
      (KeyboardInterrupt(), KeyboardInterrupt),
      (OSError(errno.ENOSPC, "No space left"), patchset.PatchError),
  )
  def test_failure_in_the_middle(self, error, expected):
    for exists in (False, True):
      if exists:
        self.out.mkdir()
      before = _snapshot(self.folder)
      with mock.patch.object(
          overlaying, "_require_importable", side_effect=error
      ):
        with self.assertRaises(expected):
          patchset.overlay(self.out, self.patches)
      self.assertEqual(_snapshot(self.folder), before)

  def test_read_only_target(self):
    self.out.mkdir()
    before = _snapshot(self.folder)
    make = tempfile.mkdtemp

    def read_only(*args, **kwargs):
      # Root may write everywhere, so the file system's answer is made here.
      if kwargs.get("dir") == self.out:
        raise OSError(errno.EROFS, "Read-only file system")
      return make(*args, **kwargs)

    with mock.patch.object(tempfile, "mkdtemp", read_only):
      status, out, err = self.run_main(*self.command("overlay"))
    self.assertEqual((status, out), (2, ""))
    self.assertRegex(err, _ONE_LINE)
    self.assertIn(f"cannot write to {self.out}: Read-only file system", err)
    self.assertEqual(_snapshot(self.folder), before)

  def test_full_disk(self):
    entries = [(f"a{n}", f"b{n}", "No space left") for n in range(999)]
    before = _snapshot(self.folder)
    error = shutil.Error(entries)
    with mock.patch.object(shutil, "copytree", side_effect=error):
      status, _, err = self.run_main(*self.command("overlay"))
    self.assertEqual(status, 2)
    self.assertEqual(
        err, f"patchset: cannot write to {self.out}: No space left\n"
    )
    self.assertEqual(_snapshot(self.folder), before)

  def test_copy_that_cannot_be_imported(self):
    _write(self.patched, {"jax/_src/new.py": "import nowhere\n"})
    _commit(self.patched, _message("fourth: Break it"))
    patchset.export(self.patched, "0.12.0", self.patches)
    before = _snapshot(self.folder)
    with self.assertRaisesRegex(
        patchset.PatchError, "cannot be imported: ModuleNotFoundError"
    ):
      patchset.overlay(self.out, self.patches)
    self.assertEqual(_snapshot(self.folder), before)


class ExportTest(_TestCase):

  def test_nothing_has_changed(self):
    before = _snapshot(self.patches)
    for _ in ("with the tag", "without it"):
      status, out, _ = self.run_main(*self.command("export"))
      self.assertEqual(status, 0)
      self.assertStartsWith(out, "nothing has changed")
      self.assertEqual(_snapshot(self.patches), before)
      git_lib.Git(self.patched).run("tag", "--delete", "jax-v0.12.0")

  def test_commit_added_and_comments_kept(self):
    text = (
        "# The order matters.\n\n# First of all.\nfirst.patch\nsecond.patch\n"
        "# Needs second.\nthird.patch\n# The end.\n"
    )
    _write(self.series, {"series": text})
    self.assertEmpty(
        patchset.export(self.patched, "0.12.0", self.patches).written
    )
    _edit(self.patched / "jax/version.py", "__version__", "x = 1\n__version__")
    _commit(self.patched, _message("fourth: Touch another file"))
    done = patchset.export(self.patched, "0.12.0", self.patches)
    self.assertEqual(done.slugs, ("first", "second", "third", "fourth"))
    self.assertCountEqual(done.written, [
        "jax-0.12.0/fourth.patch", "jax-0.12.0/series", "releases.toml",
    ])
    self.assertEqual(
        (self.series / "series").read_text("utf-8"),
        text.replace("# The end.\n", "fourth.patch\n# The end.\n"),
    )
    self.assertEqual(patchset.check(self.patches).problems, ())

  def test_commit_removed(self):
    _git(self.patched, "reset", "--quiet", "--hard", "HEAD~1")
    done = patchset.export(self.patched, "0.12.0", self.patches)
    self.assertEqual(done.removed, ("jax-0.12.0/third.patch",))
    self.assertEqual(patchset.check(self.patches).problems, ())

  def test_failure_in_the_middle(self):
    _git(self.patched, "reset", "--quiet", "--hard", "HEAD~1")
    before = _snapshot(self.folder)
    replace, calls = os.replace, []

    def fail(*args):
      calls.append(args)
      if len(calls) == 1:
        raise OSError(errno.ENOSPC, "No space left", "series")
      return replace(*args)

    with mock.patch.object(exporting.os, "replace", fail):
      with self.assertRaisesRegex(patchset.PatchError, "No space left"):
        patchset.export(self.patched, "0.12.0", self.patches)
    self.assertEqual(_snapshot(self.folder), before)

  def test_full_disk(self):
    (self.series / "third.patch").unlink()
    error = OSError(errno.ENOSPC, "No space left")
    with mock.patch.object(exporting, "_replace", side_effect=error):
      with self.assertRaisesRegex(
          patchset.PatchError, "cannot write .*/third.patch: No space left"
      ):
        patchset.export(self.patched, "0.12.0", self.patches)

  def test_explicit_base(self):
    done = patchset.export(self.patched, "0.12.0", self.patches, base="HEAD~3")
    self.assertEmpty(done.written)


class RebaseTest(_TestCase):

  def setUp(self):
    super().setUp()
    _edit(self.patches / "releases.toml", _TABLE, _OLD_TABLE + _TABLE)
    self.new = self.folder / "new"

  def rebase(self, core: str, **kwargs):
    _make_jax(self.new, "0.11.2", core)
    before = _snapshot(self.patches, self.new)
    try:
      return patchset.rebase(
          "0.12.0", "0.11.2", self.out, self.patches, root=self.new, **kwargs
      )
    finally:
      self.assertEqual(_snapshot(self.patches, self.new), before)

  def finish(self):
    """Exports what a person has in the folder, and checks it."""
    patchset.export(self.out, "0.11.2", self.patches)
    report = patchset.check(self.patches, release="0.11.2", root=self.new,
                            slugs={"0.11.2": ("first", "second")})
    self.assertEqual(report.problems, ())
    self.assertEqual(report.applied, ("jax-0.11.2",))

  def test_shifted(self):
    done = self.rebase("# New.\n" * 5 + _functions(12))
    self.assertEqual(done.applied, ("first", "second", "third"))
    self.assertIsNone(done.conflict)
    self.finish()

  def test_command_line(self):
    _make_jax(self.new, "0.11.2")
    status, out, err = self.run_main(
        "rebase", "0.12.0", "0.11.2", "--out", self.out, "--tree", self.new
    )
    self.assertEqual((status, err), (0, ""))
    self.assertIn(
        f"next: tools/patchset.py export --tree {self.out} --release 0.11.2",
        out,
    )

  def test_change_that_the_release_has(self):
    core = _functions(12).replace("a = 8\n", "a = 80  # Größer.\n")
    _make_jax(self.new, "0.11.2")
    _edit(self.patched / _MORE, "y = 3\n", "y = 2\n")
    _git(self.patched, "reset", "--quiet", "--hard", "HEAD~2")
    _edit(self.patched / _CORE, "a = 8\n", "a = 80  # Größer.\n")
    _commit(self.patched, _message("mgpu: x", "jax_mgpu_ext._src.hooks.second"))
    patchset.export(self.patched, "0.12.0", self.patches)
    done = self.rebase(core)
    self.assertEqual((done.applied, done.unneeded), (("first",), ("second",)))

  def test_conflict(self):
    core = _functions(12).replace("a = 8\n", "a = 9\n")
    done = self.rebase(core)
    self.assertTrue(done.three_way)
    self.assertEqual(done.applied, ("first",))
    self.assertEqual(done.conflict.slug, "second")
    self.assertEqual(done.remaining, ("third",))
    [place] = done.conflict.places
    self.assertRegex(place, rf"{_CORE}, lines 5\d to 5\d \(in f8\)")
    path = self.out / _CORE
    text = path.read_text("utf-8")
    head, _, rest = text.partition("<<<<<<< ")
    tail = rest.partition(">>>>>>> ")[2].partition("\n")[2]
    path.write_text(head + "  a = 90\n" + tail, "utf-8")
    _git(self.out, "add", ".")
    _git(self.out, "am", "--continue")
    _git(self.out, "am", str(self.series / "third.patch"))
    self.finish()

  def test_conflict_without_the_old_texts(self):
    self.site = self.new  # Nothing of the release that the series is for.
    core = _functions(12).replace("a = 3\n", "a = 4\n")
    done = self.rebase(core)
    self.assertFalse(done.three_way)
    self.assertEqual(done.conflict.slug, "first")
    [place] = done.conflict.places
    self.assertRegex(place, rf"{_CORE}, hunk @@ -\d+,\d+ \+\d+,\d+ @@")
    self.assertTrue((self.out / f"{_CORE}.rej").exists())
    shutil.rmtree(self.out)
    status, out, err = self.run_main(
        "rebase", "0.12.0", "0.11.2", "--out", self.out, "--tree", self.new,
        "--from-tree", self.folder / "tree",
    )
    self.assertEqual(status, 1)
    self.assertRegex(err, _ONE_LINE)
    self.assertRegex(out, rf"conflict in first: {_CORE}, lines \d+ to \d+")
    self.assertIn("not tried: second, third", out)
    self.assertIn("git am --skip", out)

  def test_old_texts_from_a_tag(self):
    self.site = self.new
    self.new = self.tree
    core = "# New.\n" + _functions(12)
    self.assertTrue(self.rebase(core).three_way)

  def test_file_that_is_gone(self):
    _make_jax(self.new, "0.11.2")
    (self.new / _MORE).unlink()
    done = patchset.rebase(
        "0.12.0", "0.11.2", self.out, self.patches, root=self.new
    )
    self.assertEqual(done.conflict.slug, "second")
    self.assertRegex(done.conflict.places[0], f"{_MORE}, added or deleted")

  @parameterized.named_parameters(
      ("wrong_sources", lambda t: _make_jax(t.new, "0.10.2"),
       "expected the sources of JAX 0.11.2, got JAX 0.10.2"),
      ("not_empty", lambda t: _write(t.out, {"notes.txt": "mine"}),
       "expected an empty or a new folder"),
      ("spoiled", lambda t: _edit(t.series / "second.patch", "y = 3", "y = 4"),
       "edited by hand"),
      ("old_sources", lambda t: _edit(t.site / _CORE, "a = 3", "a = 4"),
       "is not JAX 0.12.0.1"),
  )
  def test_bad_input(self, spoil, text):
    _make_jax(self.new, "0.11.2")
    spoil(self)
    before = _snapshot(self.folder)
    status, out, err = self.run_main(
        "rebase", "0.12.0", "0.11.2", "--out", self.out, "--tree", self.new
    )
    self.assertEqual((status, out), (2, ""))
    self.assertRegex(err, _ONE_LINE)
    self.assertRegex(err, text)
    self.assertEqual(_snapshot(self.folder), before)


class PolicyTest(absltest.TestCase):

  def test_names_every_rule(self):
    text = (_ROOT / "docs" / "patch-policy.md").read_text("utf-8")
    for word in (*legal.REASONS, *legal.TRAILERS):
      self.assertIn(f"`{word}", text)
    for verb in ("status", "check", "apply", "overlay", "export", "rebase"):
      self.assertIn(f"tools/patchset.py {verb}", text)

  def test_data_is_frozen(self):
    for cls in (
        patchset.Applied, patchset.CheckReport, patchset.Conflict,
        patchset.Exported, patchset.Overlay, patchset.PatchStatus,
        patchset.Problem, patchset.Rebased,
    ):
      self.assertTrue(dataclasses.fields(cls))
      self.assertTrue(cls.__dataclass_params__.frozen)


if __name__ == "__main__":
  absltest.main()
