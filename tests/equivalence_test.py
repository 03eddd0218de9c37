"""The hooks and the git patches of the same slugs do the same.

One behaviour suite (`tests/behaviour.py`), four ways: JAX as it is, JAX with the
hooks, a patched copy of JAX by itself, and both together.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import pathlib
import subprocess
import sys
import tempfile

from absl.testing import absltest
from absl.testing import parameterized

from jax_mgpu_ext._src import hooks
from jax_mgpu_ext._src import patchset
from jax_mgpu_ext._src import releases
from tests import behaviour
from tests import lowering
from tests import valid_programs_test

_ROOT = pathlib.Path(__file__).resolve().parents[1]


def needed_slugs() -> list[str]:
  """Returns the slugs that the running release needs."""
  slugs = []
  for slug in hooks.SLUGS:
    hook = hooks.load(slug)
    since = hook.since is None or lowering.version() >= releases.key(hook.since)
    until = hook.until is None or lowering.version() < releases.key(hook.until)
    if since and until:
      slugs.append(slug)
  return slugs


def _run(code_or_module, *args, jax_folder=None, mode="off"):
  """Runs a module or a snippet on JAX as it is, or on a patched copy."""
  paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
  if jax_folder:
    paths.insert(0, str(jax_folder))
  done = subprocess.run(
      [sys.executable, *code_or_module, *args],
      env={
          **os.environ, "JAX_PLATFORMS": "cpu", "JAX_MGPU_EXT": mode,
          "PYTHONPATH": os.pathsep.join(paths),
      },
      capture_output=True, text=True, timeout=300, check=False,
  )
  if done.returncode:
    raise AssertionError(done.stderr)
  return json.loads(done.stdout)


def _behave(*args, **kwargs):
  return _run(["-m", "tests.behaviour"], *args, **kwargs)


class EquivalenceTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    folder = tempfile.TemporaryDirectory()
    cls.addClassCleanup(folder.cleanup)
    patched = pathlib.Path(folder.name) / "patched"
    patchset.overlay(patched)
    lower = ["-c", valid_programs_test._LOWER]  # pylint: disable=protected-access
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
      runs = dict(
          clean=pool.submit(_behave),
          hooked=pool.submit(_behave, "plugin", mode="strict"),
          patched=pool.submit(_behave, jax_folder=patched),
          both=pool.submit(
              _behave, "plugin", jax_folder=patched, mode="strict"
          ),
          clean_text=pool.submit(_run, lower),
          patched_text=pool.submit(_run, lower, jax_folder=patched),
      )
      cls.reports = {name: run.result() for name, run in runs.items()}

  @parameterized.parameters("hooked", "patched", "both")
  def test_every_case_is_right(self, way):
    for slug, cases in self.reports[way]["cases"].items():
      for name, outcome in cases.items():
        with self.subTest(slug=slug, case=name):
          self.assertEqual(outcome, "ok")

  def test_every_change_is_needed(self):
    for slug in needed_slugs():
      outcomes = self.reports["clean"]["cases"][slug].values()
      self.assertTrue(any(o != "ok" for o in outcomes), slug)

  def test_right_programs_are_right_without_the_change(self):
    # Except those that use what the change adds.
    for slug, cases in self.reports["clean"]["cases"].items():
      for name, outcome in cases.items():
        if name.endswith("is_fine") and "numpy" not in name:
          self.assertEqual(outcome, "ok", f"{slug}: {name}")

  def test_states(self):
    needed = set(needed_slugs())
    for way, state in (("hooked", "applied"), ("both", "in tree")):
      states = self.reports[way]["states"]
      self.assertEqual({s for s in states if states[s] == state}, needed)
      self.assertEqual({states[s] for s in states} - {state, "not needed"}, set())

  def test_the_patched_tree_lowers_to_the_same_text(self):
    clean, patched = (
        self.reports[name]["kernels"] for name in ("clean_text", "patched_text")
    )
    self.assertEqual(clean.keys(), patched.keys())
    for name in clean:
      self.assertEqual(clean[name], patched[name], name)

  def test_the_suite_names_the_codes_of_the_hooks(self):
    for slug in hooks.SLUGS:
      codes = hooks.load(slug).codes
      self.assertEqual(
          set(behaviour.CODES[slug]),
          {c for c in codes if not c.startswith("MGPU08")},
      )

  def test_the_series_is_in_order(self):
    report = patchset.check()
    self.assertEqual([str(problem) for problem in report.problems], [])
    self.assertNotEmpty(report.applied)


class RegistryTest(absltest.TestCase):
  """On a patched JAX, both ways to register a type lead to one registry."""

  def test_one_registry(self):
    with tempfile.TemporaryDirectory() as folder:
      patched = pathlib.Path(folder) / "patched"
      patchset.overlay(patched)
      found = _run(
          ["-c", """
import json
import jax_mgpu_ext
from jax_mgpu_ext import avals
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax._src.pallas.mosaic_gpu import core
from tests import lowering

class Ours: pass
class Theirs: pass
aval = plgpu.SMEM((2, 128), "float32").get_ref_aval()
avals.register_spec(Ours, ref_aval=lambda spec: aval)
core.register_spec(Theirs, ref_aval=lambda spec: aval)
for cls in (Ours, Theirs):
  assert avals.ref_aval(cls()) == core.ref_aval_of(cls()) == aval
  lowering.lower([cls()])
avals.unregister_spec(Ours)
core.unregister_spec(Theirs)
left = []
for ask in (avals.ref_aval, core.ref_aval_of):
  for cls in (Ours, Theirs):
    try:
      ask(cls())
    except ValueError:
      pass
    else:
      left.append(cls.__name__)
print(json.dumps(left))
"""],
          jax_folder=patched, mode="on",
      )
    self.assertEqual(found, [])


if __name__ == "__main__":
  absltest.main()
