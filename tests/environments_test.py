"""When `make` makes an environment, and when it uses the one it has."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized

from jax_mgpu_ext._src import releases

_ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(_ROOT / "tools"))

# pylint: disable=g-import-not-at-top,wrong-import-position
import environments
import interpreters
import tasks

_PACKAGES = {"jax": "2.0", "wrapt": "1.0"}
_PYTHON = interpreters.Interpreter(path="/bin/false", version="3.12.1")
_RELEASES = environments.Releases(
    supported=("1.0", "1.9", "2.0"),
    default="2.0",
    pythons={"1.0": "3.11", "1.9": "3.12", "2.0": "3.12"},
)


class _TestCase(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    folder = self.enterContext(tempfile.TemporaryDirectory())
    self.root = pathlib.Path(folder).resolve()
    (self.root / "pyproject.toml").write_text("[project]", encoding="utf-8")
    for module in (environments, tasks):
      self.enterContext(mock.patch.object(module, "ROOT", self.root))
    self.said = []
    for module in (environments, tasks):
      self.enterContext(mock.patch.object(module, "say", self.said.append))
    self.found = dict(_PACKAGES)
    self.enterContext(
        mock.patch.object(
            environments.Environment, "_packages", lambda _: self.found
        )
    )

  def environment(self, name=".venv", release="2.0", python=_PYTHON):
    return environments.Environment(self.root / name, release, python)

  def finish(self, environment):
    """Makes an environment as `make` would, but without pip."""
    with mock.patch.object(subprocess, "run") as run:
      run.return_value.returncode = 0
      environment.prepare()
    return run.call_args_list


class EnvironmentTest(_TestCase):

  def test_is_made_once(self):
    environment = self.environment()
    self.assertEqual(environment.fault(), "is not there")
    venv, pip = [call.args[0] for call in self.finish(environment)]
    self.assertEqual(venv[0], _PYTHON.path)
    self.assertContainsSubset(["jax==2.0", "--editable", ".[aot,dask,test]"], pip)
    self.assertEqual(environment.fault(), "")
    self.assertEmpty(self.finish(environment))

  @parameterized.named_parameters(
      ("release", dict(release="1.9"), "another release"),
      (
          "python",
          dict(python=interpreters.Interpreter("/bin/false", "3.12.2")),
          "another python",
      ),
  )
  def test_is_made_anew_for_another(self, changes, fault):
    self.finish(self.environment())
    environment = self.environment(**changes)
    self.assertIn(fault, environment.fault())
    self.assertNotEmpty(self.finish(environment))
    self.assertEqual(environment.fault(), "")

  def test_is_made_anew_for_another_pyproject(self):
    self.finish(self.environment())
    (self.root / "pyproject.toml").write_text("[tool]", encoding="utf-8")
    self.assertIn("pyproject.toml", self.environment().fault())

  def test_is_made_anew_when_the_clone_moved(self):
    self.finish(self.environment(".venv"))
    (self.root / ".venv").rename(self.root / "moved")
    self.assertIn("another folder", self.environment("moved").fault())

  @parameterized.named_parameters(
      ("gone", {"jax": "2.0"}, "has lost wrapt 1.0"),
      ("changed", {"jax": "1.9", "wrapt": "1.0"}, "has lost jax 2.0"),
      ("broken", {}, "has lost"),
      ("more", {**_PACKAGES, "ipython": "9"}, ""),
  )
  def test_packages(self, packages, fault):
    self.finish(self.environment())
    self.found = packages
    self.assertStartsWith(self.environment().fault(), fault)
    self.assertEqual(bool(self.environment().fault()), bool(fault))

  @parameterized.named_parameters(("venv", 0), ("pip", 1))
  def test_is_not_used_when_a_step_failed(self, failing):
    environment = self.environment()
    codes = [0, 0]
    codes[failing] = 1
    with mock.patch.object(subprocess, "run") as run:
      run.side_effect = [mock.Mock(returncode=code) for code in codes]
      with self.assertRaisesRegex(interpreters.UserError, "status 1"):
        environment.prepare()
    self.assertEqual(environment.fault(), "is not finished")
    self.finish(environment)
    self.assertEqual(environment.fault(), "")
    self.assertEmpty(list(self.root.glob(".venv-saved*")))

  def test_is_not_used_when_it_was_interrupted(self):
    environment = self.environment()
    with mock.patch.object(subprocess, "run", side_effect=KeyboardInterrupt):
      with self.assertRaises(KeyboardInterrupt):
        environment.prepare()
    self.assertEqual(environment.fault(), "is not finished")

  def test_what_somebody_else_made_is_saved(self):
    for _ in range(2):
      (self.root / ".venv").mkdir()
      (self.root / ".venv" / "precious").touch()
      self.finish(self.environment())
      environments.remove(self.root / ".venv")
    saved = list(self.root.glob(".venv-saved-*"))
    self.assertLen(saved, 2)
    for folder in saved:
      self.assertTrue((folder / "precious").exists())

  def test_clean_removes_what_make_made(self):
    self.finish(self.environment())
    self.finish(self.environment(".venv-1.0"))
    (self.root / ".venv-mine").mkdir()
    (self.root / "package" / "__pycache__").mkdir(parents=True)
    self.assertEqual(tasks.clean([]), 0)
    left = {p.name for p in self.root.iterdir()}
    self.assertContainsSubset({".venv-mine", "pyproject.toml"}, left)
    self.assertNoCommonElements({".venv", ".venv-1.0"}, left)
    self.assertFalse((self.root / "package" / "__pycache__").exists())


class ChoiceTest(_TestCase):

  def setUp(self):
    super().setUp()
    self.enterContext(
        mock.patch.object(environments.Environment, "prepare", lambda _: None)
    )

  def pythons(self, *versions, named=None):
    """Says which Pythons there are, and which of them PYTHON names."""
    there = {
        ".".join(v.split(".")[:2]): interpreters.Interpreter(f"/bin/p{v}", v)
        for v in versions
    }
    self.enterContext(mock.patch.object(interpreters, "find", there.get))
    name = interpreters.Interpreter("/named", named) if named else None
    self.enterContext(mock.patch.object(interpreters, "named", lambda: name))

  @parameterized.named_parameters(
      ("both", ("3.11.7", "3.12.1"), None, "2.0", "3.12.1", ""),
      ("only_3_12", ("3.12.1",), None, "2.0", "3.12.1", ""),
      ("only_3_11", ("3.11.7",), None, "1.0", "3.11.7", "the newest"),
      ("named_3_11", ("3.12.1",), "3.11.2", "1.0", "3.11.2", "the newest"),
      ("named_3_13", ("3.12.1",), "3.13.0", "2.0", "3.13.0", ""),
  )
  def test_default(self, pythons, named, release, version, said):
    self.pythons(*pythons, named=named)
    environment = tasks.default_environment(_RELEASES)
    self.assertEqual(environment.folder, self.root / ".venv")
    self.assertEqual(environment.release, release)
    self.assertEqual(environment.interpreter.version, version)
    self.assertIn(said, " ".join(self.said))
    self.assertEqual(bool(self.said), bool(said))

  @parameterized.named_parameters(
      ("none", (), None, "neither"),
      ("other", ("3.13.0",), None, "neither"),
      ("named", ("3.12.1",), "3.10.2", "PYTHON=/named (3.10.2)"),
  )
  def test_no_python(self, pythons, named, got):
    self.pythons(*pythons, named=named)
    with self.assertRaises(interpreters.UserError) as caught:
      tasks.default_environment(_RELEASES)
    text = str(caught.exception)
    for piece in ("Python 3.12", "3.11", "JAX 1.0", got, "PYTHON="):
      self.assertIn(piece, text)

  @parameterized.named_parameters(
      ("unset", "", ["1.0", "1.9", "2.0"]),
      ("all", "all", ["1.0", "1.9", "2.0"]),
      ("others", "others", ["1.0", "1.9"]),
      ("list", "2.0 1.0", ["2.0", "1.0"]),
      ("commas", "2.0,1.0", ["2.0", "1.0"]),
  )
  def test_wanted_releases(self, value, expected):
    self.pythons("3.11.7", "3.12.1")
    with mock.patch.dict(os.environ, RELEASES=value):
      self.assertEqual(tasks.wanted_releases(_RELEASES), expected)

  @parameterized.named_parameters(
      ("unknown", "1.0 3.0", ("3.11.7",), ["got 3.0", "1.0, 1.9, 2.0"]),
      ("one", "all", ("3.12.1",), ["Python 3.11 (JAX 1.0)", '"1.9 2.0"']),
      ("two", "all", ("3.11.1",), ["Python 3.12 (JAX 1.9)", "(JAX 2.0)"]),
      ("every", "2.0", (), ["Python 3.12 (JAX 2.0)", "nothing was run"]),
  )
  def test_releases_that_cannot_run(self, value, pythons, pieces):
    self.pythons(*pythons)
    with mock.patch.dict(os.environ, RELEASES=value):
      with self.assertRaises(interpreters.UserError) as caught:
        tasks.wanted_releases(_RELEASES)
    for piece in pieces:
      self.assertIn(piece, str(caught.exception))

  @parameterized.named_parameters(
      ("nothing_yet", None, [".venv-1.0", ".venv-1.9", ".venv"]),
      ("default", "2.0", [".venv-1.0", ".venv-1.9", ".venv"]),
      ("fallback", "1.0", [".venv", ".venv-1.9", ".venv-2.0"]),
  )
  def test_folders(self, held, expected):
    self.pythons("3.11.7", "3.12.1")
    if held:
      (self.root / ".venv").mkdir()
      stamp = self.root / ".venv" / environments.STAMP
      stamp.write_text(json.dumps({"release": held}), encoding="utf-8")
    folders = [
        tasks.release_environment(release, _RELEASES).folder.name
        for release in _RELEASES.supported
    ]
    self.assertEqual(folders, expected)


class InterpretersTest(parameterized.TestCase):

  def test_probe_knows_this_python(self):
    found = interpreters.probe(sys.executable)
    self.assertEqual(
        found.version, ".".join(map(str, sys.version_info[:3]))
    )
    # Not the virtual environment that this test may run in.
    self.assertFalse(
        pathlib.Path(found.path).parent.parent.joinpath("pyvenv.cfg").exists()
    )

  @parameterized.parameters("/bin/false", "no-such-python", "/bin/echo")
  def test_probe_knows_what_is_no_python(self, command):
    self.assertIsNone(interpreters.probe(command))


class TasksTest(parameterized.TestCase):

  def test_reads_the_table_of_releases(self):
    found = environments.read_releases()
    self.assertEqual(found.supported, releases.SUPPORTED)
    self.assertEqual(found.default, releases.DEFAULT)
    self.assertEqual(found.pythons, releases.PYTHONS)
    self.assertSameElements(found.pythons, found.supported)

  @parameterized.named_parameters(
      ("release", {"RELEASES": "9.9"}, ["9.9", *releases.SUPPORTED]),
      ("python", {"PYTHON": "/bin/false"}, ["PYTHON=/bin/false", "venv"]),
      ("no_python", {"PATH": "/nowhere"}, ["3.11", "3.12", "nothing was run"]),
  )
  def test_answers_in_one_line(self, env, pieces):
    nowhere = {"HOME": "/nowhere", "PYENV_ROOT": "", "XDG_DATA_HOME": ""}
    done = subprocess.run(
        [sys.executable, "-B", _ROOT / "tools/tasks.py", "test-releases"],
        env={**os.environ, "PYTHON": "", "RELEASES": "", **nowhere, **env},
        capture_output=True,
        text=True,
        check=False,
    )
    self.assertEqual(done.returncode, 2)
    self.assertEqual(done.stdout, "")
    self.assertRegex(done.stderr, r"\Aenvironments: error: [^\n]+\n\Z")
    for piece in pieces:
      self.assertIn(piece, done.stderr)


if __name__ == "__main__":
  absltest.main()
