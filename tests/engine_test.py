"""The parts of the hook engine on objects made for the test."""

from __future__ import annotations

import sys
import types

from absl.testing import absltest
from absl.testing import parameterized

from jax_mgpu_ext._src import hooks
from jax_mgpu_ext._src import releases
from jax_mgpu_ext._src.hooks import contract
from jax_mgpu_ext._src.hooks import guard
from jax_mgpu_ext._src.hooks import ledger as ledger_lib

_MODULE = "mgpu_ext_test_module"


def _original(x):
  """Doc."""
  return x + 1  # A comment.


def _same(x):
  return x + 1


def _other(x):
  return x + 2


class Base:

  def inherited(self):
    return "base"

  def method(self):
    return "base"


class Derived(Base):

  @staticmethod
  def static():
    return "static"

  def method(self):
    return "derived"


class LedgerTest(absltest.TestCase):

  def test_attributes_and_order(self):
    module = types.ModuleType("m")
    module.f = _original
    ledger = ledger_lib.Ledger()
    ledger.set_attr(module, "f", _other)
    ledger.set_attr(module, "f", _same)
    ledger.set_attr(module, "added", 3)
    self.assertIs(module.f, _same)
    self.assertEqual(
        ledger.replaced(), [(_original, _other), (_other, _same)]
    )
    ledger.rollback()
    self.assertIs(module.f, _original)
    self.assertFalse(hasattr(module, "added"))
    ledger.rollback()  # Nothing is left to undo.
    self.assertIs(module.f, _original)

  def test_descriptors_and_inherited_methods(self):
    static = vars(Derived)["static"]
    ledger = ledger_lib.Ledger()
    ledger.set_attr(Derived, "static", staticmethod(lambda: "ours"))
    ledger.set_attr(Derived, "inherited", lambda self: "ours")
    self.assertEqual(Derived.static(), "ours")
    self.assertEqual(Derived().inherited(), "ours")
    ledger.rollback()
    self.assertIs(vars(Derived)["static"], static)
    self.assertNotIn("inherited", vars(Derived))
    self.assertEqual(Derived().inherited(), "base")

  def test_aliases(self):
    source, alias = types.ModuleType("s"), types.ModuleType(_MODULE)
    source.f = alias.g = _original
    alias.own = _other
    sys.modules[_MODULE] = alias
    self.addCleanup(sys.modules.pop, _MODULE)
    names = (f"{_MODULE}:g", f"{_MODULE}:own", f"{_MODULE}:gone", "no.such:f")
    ledger = ledger_lib.Ledger()
    ledger.set_attr(source, "f", _same, names)
    self.assertIs(alias.g, _same)
    self.assertIs(alias.own, _other)  # Not the object that was replaced.
    # A module that is imported later binds the replacement by itself.
    alias.own = _same
    self.assertEqual(ledger.rollback(), [])
    self.assertIs(alias.g, _original)
    self.assertIs(alias.own, _original)

  def test_foreign_patches_stay_until_they_are_gone(self):
    module = types.ModuleType("m")
    module.f, module.g = _original, 1
    ledger = ledger_lib.Ledger()
    ledger.set_attr(module, "f", _same)
    ledger.set_attr(module, "g", 2)
    module.f, module.g = _other, 3
    self.assertEqual(ledger.rollback(), ["m.g", "m.f"])
    self.assertIs(module.f, _other)
    self.assertEqual(module.g, 3)
    module.f, module.g = _same, 2  # The others have cleaned up.
    self.assertEqual(ledger.rollback(), [])
    self.assertIs(module.f, _original)
    self.assertEqual(module.g, 1)

  def test_a_foreign_alias_stays_until_it_is_gone(self):
    source, alias = types.ModuleType("s"), types.ModuleType(_MODULE)
    source.f = alias.f = _original
    sys.modules[_MODULE] = alias
    self.addCleanup(sys.modules.pop, _MODULE)
    ledger = ledger_lib.Ledger()
    ledger.set_attr(source, "f", _same, (f"{_MODULE}:f",))
    alias.f = _other
    self.assertEqual(ledger.rollback(), [f"{_MODULE}.f"])
    self.assertIs(source.f, _original)
    alias.f = _same
    self.assertEqual(ledger.rollback(), [])
    self.assertIs(alias.f, _original)


class FingerprintTest(parameterized.TestCase):

  def test_layout_comments_and_docstrings_do_not_count(self):
    renamed = guard.fingerprint(_same)
    # Only the name differs, which counts: two functions are two targets.
    self.assertNotEqual(guard.fingerprint(_original), renamed)
    namespace = _compiled("def f(x):\n  '''Doc.'''\n  return (x +\n      1)\n")
    other = _compiled("def f(x):\n  # Comment.\n\n  return x + 1\n")
    self.assertEqual(guard.fingerprint(namespace), guard.fingerprint(other))

  def test_content_counts(self):
    prints = {
        guard.fingerprint(_compiled(f"def f(x, y=1):\n  return {body}\n"))
        for body in ("x + 1", "x + 2", "x - 1", "y + 1", "'x' + 1", "not x")
    }
    self.assertLen(prints, 6)

  def test_a_wrapper_is_not_its_function(self):
    import functools  # pylint: disable=g-import-not-at-top

    @functools.wraps(_original)
    def wrapper(x):
      return _original(x)

    self.assertNotEqual(
        guard.fingerprint(wrapper), guard.fingerprint(_original)
    )

  def test_context_managers_are_told_apart(self):
    import contextlib  # pylint: disable=g-import-not-at-top

    make = lambda text: contextlib.contextmanager(_compiled(text))
    one = guard.fingerprint(make("def f():\n  yield 1\n"))
    self.assertEqual(one, guard.fingerprint(make("def f():\n  yield  1\n")))
    self.assertNotEqual(
        one, guard.fingerprint(make("def f():\n  yield 2\n"))
    )

  @parameterized.parameters(
      (None, contract.ABSENT), (len, guard.NO_SOURCE), (3, guard.NO_SOURCE),
      (eval("lambda x: x"), guard.NO_SOURCE),  # pylint: disable=eval-used
  )
  def test_without_source(self, value, expected):
    self.assertEqual(guard.fingerprint(value), expected)

  def test_the_table_covers_every_target_and_release(self):
    for slug in hooks.SLUGS:
      for target in hooks.load(slug).targets:
        found = releases.FINGERPRINTS[str(target)]
        covered = {v for versions in found.values() for v in versions}
        self.assertEqual(covered, set(releases.SUPPORTED), target)
        self.assertNotIn(guard.NO_SOURCE, found)

  def test_triggers_are_the_modules_of_all_targets(self):
    modules = set()
    for slug in hooks.SLUGS:
      modules |= hooks.load(slug).modules
    self.assertEqual(set(hooks.TRIGGERS), modules)


def _compiled(source):
  """Compiles a function whose source `inspect` can find."""
  import linecache  # pylint: disable=g-import-not-at-top

  _compiled.count = getattr(_compiled, "count", 0) + 1
  name = f"<test {_compiled.count}>"
  linecache.cache[name] = (len(source), None, source.splitlines(True), name)
  namespace = {}
  exec(compile(source, name, "exec"), namespace)  # pylint: disable=exec-used
  return namespace["f"]


class JudgeTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    module = types.ModuleType(_MODULE)
    module.f = _original
    sys.modules[_MODULE] = module
    self.addCleanup(sys.modules.pop, _MODULE)
    self.target = contract.Target(module=_MODULE, name="f")
    self.print = guard.fingerprint(_original)
    self.addCleanup(releases.FINGERPRINTS.pop, str(self.target), None)

  def _judge(self, version="0.12.0.1", **kwargs):
    hook = contract.Hook(
        slug="test", why="", codes=(), targets=(self.target,),
        apply=lambda ledger: None, **kwargs,
    )
    return guard.judge(hook, version, {})

  def test_known_release_and_known_fingerprint(self):
    releases.FINGERPRINTS[str(self.target)] = {self.print: ("0.12.0.1",)}
    verdict = self._judge()
    self.assertEqual((verdict.state, verdict.reason), ("fits", ""))
    self.assertEqual(self._judge("0.12.0").reason, "")  # The same sources.

  def test_known_release_and_unknown_fingerprint(self):
    verdict = self._judge()
    self.assertEqual(verdict.state, "refused")
    self.assertIn(f"{_MODULE}:f is {self.print}", verdict.found)
    self.assertIn("0.12.0.1", verdict.required)

  def test_unknown_release_and_known_fingerprint(self):
    releases.FINGERPRINTS[str(self.target)] = {self.print: ("0.12.0.1",)}
    verdict = self._judge("0.13.0.dev20261201")
    self.assertEqual(verdict.state, "fits")
    self.assertIn("0.13.0.dev20261201 is not a tested release", verdict.reason)

  def test_unknown_release_and_unknown_fingerprint(self):
    self.assertEqual(self._judge("0.13.0").state, "refused")

  def test_in_tree(self):
    native = contract.Target(module=_MODULE, name="native")
    self.assertEqual(self._judge(native=native).state, "refused")
    sys.modules[_MODULE].native = _other
    verdict = self._judge(native=native)
    self.assertEqual(verdict.state, "in tree")
    self.assertIn("itself", verdict.reason)
    self.assertIn(f"{_MODULE}:native", verdict.found)

  def test_missing_target(self):
    del sys.modules[_MODULE].f
    verdict = self._judge()
    self.assertEqual(verdict.state, "refused")
    self.assertIn("is absent", verdict.found)

  def test_too_old(self):
    self.assertEqual(self._judge("0.11.1", since="0.11.2").state, "not needed")
    self.assertEqual(self._judge("0.11.2", since="0.11.2").state, "refused")

  def test_no_longer_needed(self):
    self.assertEqual(self._judge("0.12.0", until="0.12.0").state, "not needed")
    self.assertEqual(self._judge("0.11.2", until="0.12.0").state, "refused")

  def test_versions_compare_as_numbers(self):
    self.assertGreater(releases.key("0.12.0.1"), releases.key("0.12.0"))
    self.assertGreater(releases.key("0.12.0"), releases.key("0.9.10"))
    self.assertEqual(releases.key("0.12.0.dev1+abc"), (0, 12, 0))
    self.assertEqual(releases.key("nonsense"), ())


class HookDataTest(absltest.TestCase):

  def test_contract(self):
    for slug in hooks.SLUGS:
      hook = hooks.load(slug)
      self.assertEqual(hook.slug, slug)
      self.assertTrue(hook.why.strip())
      self.assertIsNotNone(hook.native)
      self.assertNotEmpty(hook.targets)
      self.assertLen(set(map(str, hook.targets)), len(hook.targets))

  def test_unknown_slug(self):
    with self.assertRaisesRegex(ValueError, "'banana'.*aval_dispatch"):
      hooks.load("banana")

  def test_every_alias_exists(self):
    import importlib  # pylint: disable=g-import-not-at-top
    for slug in hooks.SLUGS:
      for target in hooks.load(slug).targets:
        for alias in target.aliases:
          module, _, name = alias.partition(":")
          value = getattr(importlib.import_module(module), name)
          self.assertIs(value, target.current(), alias)


if __name__ == "__main__":
  absltest.main()
