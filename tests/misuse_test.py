"""What a user is told about a misused spec, as a table of cases."""

from __future__ import annotations

from absl.testing import absltest
from absl.testing import parameterized

import jax_mgpu_ext  # pylint: disable=unused-import
from jax_mgpu_ext import hooks
from jax_mgpu_ext._src import errors
from tests import lowering
from tests import misuse_cases


def _named(cases):
  return [(f"{group}/{c.id}", c) for group, cs in cases.items() for c in cs]


class MisuseTest(parameterized.TestCase):

  @parameterized.named_parameters(
      (name, case) for name, case in _named(misuse_cases.GROUPS)
  )
  def test_case(self, case):
    if lowering.version() < case.since:
      self.skipTest("JAX did not have this yet in the running release")
    if case.raises is None:
      case.expr()
      return
    expected = (
        case.raises if isinstance(case.raises, tuple) else (case.raises,)
    )
    with self.assertRaises(Exception) as caught:
      case.expr()
    error = caught.exception
    for kind in expected:
      self.assertIsInstance(error, kind)
    for fragment in case.says:
      self.assertIn(fragment, str(error))
    if case.code:
      self.assertIsInstance(error, errors.SpecError)
      self.assertEqual(error.code, case.code)
      self.assertIn(f"[{case.code}]", str(error))
      self.assertNotIn("\n", error.problem + error.hint)

  def test_every_group_has_both_kinds(self):
    for group, cases in misuse_cases.GROUPS.items():
      self.assertTrue(any(c.raises for c in cases), group)
      self.assertTrue(any(not c.raises for c in cases), group)

  def test_every_code_of_a_hook_has_a_case(self):
    covered = {c.code for _, c in _named(misuse_cases.GROUPS)}
    declared = {
        code for slug in hooks.SLUGS
        # What only happens when a kernel runs has kernels in `tests/negatives`.
        for code in _hook(slug).codes if not code.startswith(("MGPU08", "DL"))
    }
    self.assertEqual(declared - covered, set())


def _hook(slug):
  from jax_mgpu_ext._src import hooks as engine  # pylint: disable=g-import-not-at-top
  return engine.load(slug)


if __name__ == "__main__":
  absltest.main()
