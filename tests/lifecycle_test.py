"""Activation in every order, each in a process of its own."""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import os

from absl.testing import absltest
from absl.testing import parameterized

from tests import child

# P: import the plugin, G: import plgpu, A: activate, D: deactivate. The plugin
# must be there before it can be told anything.
ORDERS = ("PGAD", "PGDA", "PAGD", "PADG", "PDGA", "PDAG", "GPAD", "GPDA")
MODES = ("on", "off", "strict")

# Does the events of argv[1], and prints after each what a program would see.
_DRIVER = """
import json, sys, warnings
warnings.simplefilter("ignore", DeprecationWarning)

def observe():
  core = sys.modules.get("jax._src.pallas.mosaic_gpu.core")
  if "jax.experimental.pallas.mosaic_gpu" not in sys.modules:
    return dict(loaded=core is not None)
  from jax.experimental import pallas as pl
  from jax.experimental.pallas import mosaic_gpu as plgpu
  from jax._src.pallas import primitives, pallas_call
  from jax._src.state import types
  seen = dict(loaded=True)
  try:
    plgpu.Barrier(num_barriers=0)
    seen["method"] = False
  except ValueError:
    seen["method"] = True
  try:
    plgpu.kernel(lambda o: None, banana=1)
  except TypeError as e:
    seen["function"] = isinstance(e, ValueError)
  seen["installed"] = hasattr(core, "ref_aval_of")
  seen["added"] = "get_array_aval" in vars(plgpu.ACC)
  seen["aliases"] = (
      plgpu.kernel is core.kernel
      and pl.run_scoped is primitives.run_scoped
      and pl.pallas_call is pallas_call.pallas_call
  )
  return seen

report = []
for event in sys.argv[1]:
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    if event == "P":
      import jax_mgpu_ext
    elif event == "G":
      from jax.experimental.pallas import mosaic_gpu
      from jax._src.pallas.mosaic_gpu.interpret import jaxpr_interpret
    elif event == "A":
      jax_mgpu_ext.activate()
    elif event == "D":
      jax_mgpu_ext.deactivate()
  states = (
      [s.state for s in jax_mgpu_ext.status()]
      if "jax_mgpu_ext" in sys.modules else []
  )
  late = [str(w.message) for w in caught
          if w.category.__name__ == "LateActivationWarning"]
  report.append(dict(event=event, states=states, late=late, **observe()))
print(json.dumps(report))
"""


def _observe(order: str, mode: str):
  return json.loads(
      child.check_output(_DRIVER, order, env={"JAX_MGPU_EXT": mode})
  )


class OrderTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    keys = list(itertools.product(ORDERS, MODES))
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
      reports = pool.map(lambda key: _observe(*key), keys)
      cls._reports = dict(zip(keys, reports))

  @parameterized.parameters(*itertools.product(ORDERS, MODES))
  def test_order(self, order, mode):
    active = imported = False
    for step in self._reports[order, mode]:
      event = step["event"]
      active = dict(P=mode != "off", A=True, D=False).get(event, active)
      imported = imported or event == "G"
      with self.subTest(step=step):
        self.assertEqual(step["loaded"], imported)
        if imported:
          self.assertEqual(step["method"], active)
          self.assertEqual(step["function"], active)
          self.assertEqual(step["installed"], active)
          self.assertEqual(step["added"], active)
          self.assertTrue(step["aliases"])
        if step["states"]:
          expected = "off"
          if active:
            expected = "applied" if imported else "pending"
          # Some releases do not need all hooks.
          self.assertEqual(set(step["states"]) - {"not needed"}, {expected})
        # Nobody but JAX itself has bound anything in these programs.
        self.assertEqual(step["late"], [])

  def test_no_order_is_missing(self):
    possible = {
        "".join(order)
        for order in itertools.permutations("PGAD")
        if order.index("P") < min(order.index("A"), order.index("D"))
    }
    self.assertEqual(set(ORDERS), possible)

  def test_an_order_can_fail(self):
    # The same driver with hooks that do nothing sees unhooked JAX.
    report = json.loads(child.check_output(
        _DRIVER, "PG",
        env={
            "JAX_MGPU_EXT_DISABLE": "barrier_constructors,moved_keywords",
        },
    ))
    self.assertFalse(report[-1]["method"])
    self.assertFalse(report[-1]["function"])
    self.assertTrue(report[-1]["installed"])


class ImportTest(absltest.TestCase):

  def test_import_loads_no_jax_and_no_wrapt(self):
    out = child.check_output("""
        import sys
        import jax_mgpu_ext
        print(sorted(m for m in sys.modules if m.partition(".")[0] in (
            "jax", "jaxlib", "wrapt", "numpy", "rich", "typer", "asyncio")))
    """)
    self.assertEqual(out.strip(), "[]")

  def test_import_beside_jax_loads_no_pallas(self):
    code = """
        import sys
        import jax
        before = set(sys.modules)
        {}
        new = set(sys.modules) - before
        print(sum("pallas" in m or "mlir" in m for m in new))
    """
    self.assertEqual(
        child.check_output(code.format("import jax_mgpu_ext")).strip(), "0"
    )
    # The same count does see Pallas.
    counted = child.check_output(
        code.format("import jax.experimental.pallas.mosaic_gpu")
    )
    self.assertGreater(int(counted), 10)

  def test_plain_pallas_first(self):
    out = child.check_output("""
        from jax.experimental import pallas as pl
        import jax_mgpu_ext
        from jax.experimental.pallas import mosaic_gpu as plgpu
        from jax._src.pallas.mosaic_gpu.interpret import jaxpr_interpret  # For its hook.
        from jax._src.pallas import primitives
        assert pl.run_scoped is primitives.run_scoped
        print({s.state for s in jax_mgpu_ext.status()} - {"not needed"})
    """)
    self.assertEqual(out.strip(), "{'applied'}")

  def test_public_names(self):
    child.check_output("""
        import jax_mgpu_ext
        for name in jax_mgpu_ext.__all__:
          assert getattr(jax_mgpu_ext, name) is not None, name
          assert name in dir(jax_mgpu_ext), name
        try:
          jax_mgpu_ext.banana
        except AttributeError as e:
          assert "banana" in str(e)
        else:
          raise AssertionError
    """)


class LateTest(absltest.TestCase):
  """Modules that bound something before the hooks were applied."""

  _USER = """
      import sys, types, warnings
      def user_module():
        module = types.ModuleType("my_kernels")
        exec("from jax.experimental.pallas.mosaic_gpu import kernel\\n"
             "from jax.experimental.pallas import run_scoped as scoped\\n",
             module.__dict__)
        sys.modules["my_kernels"] = module
      def late(caught):
        return [w for w in caught
                if w.category.__name__ == "LateActivationWarning"]
  """

  def _run(self, body):
    return child.check_output(
        _dedented(self._USER) + _dedented(body)
    )

  def test_late_activation_names_the_module_once(self):
    out = self._run("""
        user_module()
        with warnings.catch_warnings(record=True) as caught:
          warnings.simplefilter("always")
          import jax_mgpu_ext
        [warning] = late(caught)
        assert warning.filename == "<string>", warning.filename
        print(warning.message)
    """)
    self.assertIn("my_kernels.kernel", out)
    self.assertIn("my_kernels.scoped", out)
    self.assertNotIn("jax.", out)
    self.assertIn("MGPU092", out)

  def test_timely_activation_is_silent(self):
    out = self._run("""
        with warnings.catch_warnings(record=True) as caught:
          warnings.simplefilter("always")
          import jax_mgpu_ext
          user_module()
        print(len(late(caught)))
        from jax.experimental.pallas import mosaic_gpu as plgpu
        assert sys.modules["my_kernels"].kernel is plgpu.kernel
    """)
    self.assertEqual(out.strip(), "0")

  def test_late_deactivation_names_the_module_too(self):
    out = self._run("""
        import jax_mgpu_ext
        user_module()
        with warnings.catch_warnings(record=True) as caught:
          warnings.simplefilter("always")
          jax_mgpu_ext.deactivate()
        [warning] = late(caught)
        print(warning.message)
    """)
    self.assertIn("my_kernels.kernel", out)


def _dedented(text):
  import textwrap  # pylint: disable=g-import-not-at-top
  return textwrap.dedent(text)


class EnvironmentTest(parameterized.TestCase):

  def test_disable(self):
    out = child.check_output(
        """
        import jax_mgpu_ext
        from jax.experimental.pallas import mosaic_gpu as plgpu
        plgpu.Barrier(num_barriers=0)
        try:
          plgpu.SMEM((-1,), "float32")
        except ValueError:
          print([s.slug for s in jax_mgpu_ext.status() if s.state == "disabled"])
        """,
        env={"JAX_MGPU_EXT_DISABLE": " barrier_constructors, ref_unions,"},
    )
    self.assertEqual(out.strip(), "['barrier_constructors', 'ref_unions']")

  @parameterized.parameters(
      ({"JAX_MGPU_EXT": "yes"}, ["JAX_MGPU_EXT='yes'", "on, off, strict"]),
      (
          {"JAX_MGPU_EXT_DISABLE": "ref_unions,banana"},
          ["'banana'", "ref_unions", "moved_keywords"],
      ),
  )
  def test_illegal_values(self, env, says):
    result = child.run("import jax_mgpu_ext", env=env)
    self.assertEqual(result.returncode, 1)
    self.assertIn("ConfigError", result.stderr)
    self.assertIn("MGPU090", result.stderr)
    for text in says:
      self.assertIn(text, result.stderr)

  @parameterized.parameters("", "on", "ON", " strict ", "off")
  def test_legal_values(self, mode):
    child.check_output("import jax_mgpu_ext", env={"JAX_MGPU_EXT": mode})

  def test_each_hook_alone(self):
    # A hook must work, and undo itself, without any other.
    out = child.check_output("""
        import os
        os.environ["JAX_MGPU_EXT"] = "off"
        import jax_mgpu_ext
        from jax_mgpu_ext import hooks
        from jax.experimental.pallas import mosaic_gpu as plgpu
        from jax._src.pallas.mosaic_gpu.interpret import jaxpr_interpret  # For its hook.
        from tests import lowering
        for slug in hooks.SLUGS:
          others = [s for s in hooks.SLUGS if s != slug]
          os.environ["JAX_MGPU_EXT_DISABLE"] = ",".join(others)
          with jax_mgpu_ext.activated():
            states = {s.slug: s.state for s in jax_mgpu_ext.status()}
            assert states.pop(slug) in ("applied", "not needed"), (slug, states)
            assert set(states.values()) == {"disabled"}
            lowering.lower([plgpu.Barrier(num_barriers=2), None])
        print("done")
    """)
    self.assertEqual(out.strip(), "done")


class RefusalTest(parameterized.TestCase):
  """A JAX whose sources are not the ones that the hooks were tested with."""

  _CHANGED = """
      import functools, logging, sys
      logging.basicConfig(level=logging.INFO)
      from jax._src.pallas.mosaic_gpu import core
      original = core.Mesh.__post_init__
      def __post_init__(self):
        original(self)  # Somebody's own patch.
      core.Mesh.__post_init__ = __post_init__
  """

  def test_a_refused_hook_leaves_the_others(self):
    out = child.check_output(_dedented(self._CHANGED) + _dedented("""
        import jax_mgpu_ext
        from jax.experimental.pallas import mosaic_gpu as plgpu
        from jax._src.pallas.mosaic_gpu.interpret import jaxpr_interpret  # For its hook.
        assert core.Mesh.__post_init__ is __post_init__
        states = {s.slug: s for s in jax_mgpu_ext.status()}
        refused = states.pop("cluster_axes")
        assert refused.state == "refused", refused
        assert "Mesh.__post_init__ is " in refused.found, refused
        assert "0.12.0.1" in refused.required, refused
        print({s.state for s in states.values()} - {"not needed"})
    """))
    self.assertEqual(out.strip(), "{'applied'}")

  @parameterized.parameters("PG", "GP")
  def test_strict_raises_and_leaves_nothing(self, order):
    imports = dict(
        P="import jax_mgpu_ext",
        G="from jax.experimental.pallas import mosaic_gpu as plgpu",
    )
    out = child.check_output(
        _dedented(self._CHANGED) + _dedented(f"""
        before = dict(vars(core))
        try:
          {imports[order[0]]}
          {imports[order[1]]}
        except RuntimeError as e:
          print(type(e).__name__, e)
        assert dict(vars(core)) == before
        assert "get_array_aval" not in vars(core.WGMMAAccumulatorRef)
        """),
        env={"JAX_MGPU_EXT": "strict"},
    )
    self.assertIn("HookRefusedError", out)
    self.assertIn("MGPU091", out)
    self.assertIn("cluster_axes", out)

  def test_strict_is_silent_where_all_fits(self):
    child.check_output(
        """
        import jax_mgpu_ext
        from jax.experimental.pallas import mosaic_gpu as plgpu
        from jax._src.pallas.mosaic_gpu.interpret import jaxpr_interpret  # For its hook.
        assert {s.state for s in jax_mgpu_ext.status()} <= {"applied", "not needed"}
        """,
        env={"JAX_MGPU_EXT": "strict"},
    )

  def test_unknown_release_with_known_sources(self):
    result = child.run("""
        import logging
        logging.basicConfig(level=logging.INFO)
        import jax.version
        jax.version.__version__ = "0.99.0"
        import jax_mgpu_ext
        from jax.experimental.pallas import mosaic_gpu as plgpu
        from jax._src.pallas.mosaic_gpu.interpret import jaxpr_interpret  # For its hook.
        # The interpreter of 0.10.2 is not that of any later release.
        states = [
            s for s in jax_mgpu_ext.status()
            if s.state != "not needed" and s.slug != "interpret_deadlock"
        ]
        assert {s.state for s in states} == {"applied"}, states
        assert all("0.99.0" in s.reason for s in states)
    """)
    self.assertEqual(result.returncode, 0, result.stderr)
    self.assertEqual(result.stderr.count("0.99.0 is not a tested release"), 1)


_INTERRUPTS = """
import functools, os, sys
os.environ["JAX_MGPU_EXT"] = "off"
import jax_mgpu_ext
from jax_mgpu_ext._src import hooks
from jax_mgpu_ext._src.hooks import guard
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax._src.pallas import core as pallas_core, mpmd, pallas_call, primitives
from jax._src.pallas.mosaic_gpu import core, lowering
from jax._src.state import types

# These change nothing, and would read the same sources, and look through all
# modules, again and again.
guard.fingerprint = functools.cache(guard.fingerprint)
hooks.late.warn_of_stale = lambda *args: None
OWNERS = (pl, plgpu, pallas_core, mpmd, pallas_call, primitives, core, lowering,
          types.RefIndexer, core.Barrier, core.ClusterBarrier, core.RefUnion,
          core.Mesh, core.GPUMemoryRef, core.MemorySpace, core.TilingTransform,
          core.SwizzleTransform, core.WGMMAAccumulatorRef)
FOLDER = os.path.dirname(hooks.__file__)

def snapshot():
  return [dict(vars(owner)) for owner in OWNERS]

def interrupted(function, at):
  "Calls a function with a Ctrl-C at the given line; returns the lines it had."
  count = 0
  def trace(frame, event, arg):
    nonlocal count
    if not frame.f_code.co_filename.startswith(FOLDER):
      return None
    if frame.f_code.co_filename.endswith(("guard.py", "contract.py")):
      return None
    if event == "line":
      count += 1
      if count == at:
        raise KeyboardInterrupt
    return trace
  sys.settrace(trace)
  try:
    function()
  except KeyboardInterrupt:
    pass
  finally:
    sys.settrace(None)
  return count

clean = snapshot()
hooks.activate()
applied = snapshot()
hooks.deactivate()
assert snapshot() == clean != applied
bad = []
total = 0
for function, start in ((hooks.activate, False), (hooks.deactivate, True)):
  hooks.activate() if start else hooks.deactivate()
  lines = interrupted(function, -1)
  total += lines
  for at in range(1, lines + 1):
    hooks.activate() if start else hooks.deactivate()
    interrupted(function, at)
    if hooks.is_active() != (len(hooks._engine.ledgers) > 0):
      bad.append((function.__name__, at, "half active"))
    hooks.deactivate()
    if snapshot() != clean:
      bad.append((function.__name__, at, "JAX is changed"))
      break
    hooks.activate()
    if snapshot() == clean:
      bad.append((function.__name__, at, "cannot be activated again"))
print(total, bad)
"""


class EngineTest(absltest.TestCase):

  def test_a_failing_apply_is_rolled_back(self):
    out = child.check_output("""
        import dataclasses
        from jax_mgpu_ext._src import hooks
        hooks.deactivate()
        from jax_mgpu_ext._src.hooks import ref_unions
        from jax.experimental.pallas import mosaic_gpu as plgpu
        before = plgpu.RefUnion.__init__
        def apply(ledger):
          ledger.set_attr(plgpu.RefUnion, "__init__", lambda self: None)
          raise RuntimeError("half way")
        broken = dataclasses.replace(ref_unions.HOOK, apply=apply)
        ref_unions.HOOK = broken
        hooks.activate()
        states = {s.slug: s for s in hooks.status()}
        assert states["ref_unions"].state == "failed"
        assert "half way" in states["ref_unions"].reason
        assert plgpu.RefUnion.__init__ is before
        assert states["transforms"].state == "applied"
        print("ok")
    """)
    self.assertEqual(out.strip(), "ok")

  def test_foreign_patch_on_top_is_left_alone(self):
    out = child.check_output("""
        import warnings
        import jax_mgpu_ext
        from jax.experimental.pallas import mosaic_gpu as plgpu
        from jax._src.pallas.mosaic_gpu import core
        ours = core.Barrier.__post_init__
        def foreign(self):
          ours(self)
        core.Barrier.__post_init__ = foreign
        with warnings.catch_warnings(record=True) as caught:
          warnings.simplefilter("always")
          jax_mgpu_ext.deactivate()
        assert core.Barrier.__post_init__ is foreign
        [w] = [w for w in caught if w.category.__name__ == "ForeignPatchWarning"]
        print(w.message)
    """)
    self.assertIn("Barrier.__post_init__", out)
    self.assertIn("MGPU093", out)

  def test_a_foreign_patch_can_be_undone_and_then_ours(self):
    child.check_output("""
        import unittest.mock, warnings
        warnings.simplefilter("ignore")
        import jax_mgpu_ext
        from jax.experimental.pallas import mosaic_gpu as plgpu
        from jax._src.pallas.mosaic_gpu.interpret import jaxpr_interpret  # For its hook.
        from jax._src.pallas.mosaic_gpu import core
        from jax_mgpu_ext import hooks
        original = hooks.get_original(plgpu.kernel)
        with unittest.mock.patch.object(plgpu, "kernel"):
          with unittest.mock.patch.object(core, "kernel"):
            jax_mgpu_ext.deactivate()
        assert core.kernel is not original
        jax_mgpu_ext.deactivate()
        assert core.kernel is original and plgpu.kernel is original
        jax_mgpu_ext.activate()
        assert {s.state for s in jax_mgpu_ext.status()} <= {
            "applied", "not needed"}
    """)

  def test_warnings_as_errors_leave_nothing_behind(self):
    child.check_output(_dedented(LateTest._USER) + _dedented("""
        user_module()
        warnings.simplefilter("error", RuntimeWarning)
        from jax._src.pallas.mosaic_gpu import core
        before = dict(vars(core))
        for attempt in range(2):
          try:
            import jax_mgpu_ext
          except RuntimeWarning as e:
            assert "my_kernels" in str(e)
          else:
            raise AssertionError
          assert dict(vars(core)) == before
          sys.modules.pop("jax_mgpu_ext", None)
    """))

  def test_overlapping_blocks(self):
    child.check_output("""
        import os
        os.environ["JAX_MGPU_EXT"] = "off"
        import jax_mgpu_ext
        from jax_mgpu_ext import hooks
        first, second = hooks.activated(), hooks.activated()
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert hooks.is_active()
        second.__exit__(None, None, None)
        assert not hooks.is_active()
        with hooks.activated():
          hooks.activate()
        assert hooks.is_active()
    """)

  def test_a_block_that_begins_while_the_last_one_ends(self):
    # Whichever of the two comes first, the hooks are on in the new block, and
    # the import of Pallas is still watched for.
    out = child.check_output("""
        import os
        os.environ["JAX_MGPU_EXT"] = "off"
        import threading
        import jax_mgpu_ext
        from jax_mgpu_ext import hooks
        from jax_mgpu_ext._src.hooks import import_hook
        entered, leave = threading.Event(), threading.Event()
        states = []
        def block():
          with hooks.activated():
            entered.set()
            leave.wait(60)
            from jax.experimental.pallas import mosaic_gpu as plgpu
            from jax._src.pallas.mosaic_gpu.interpret import jaxpr_interpret
            states.extend(s.state for s in hooks.status())
        thread = threading.Thread(target=block)
        unwatch = import_hook.unwatch
        def slow_unwatch():
          import_hook.unwatch = unwatch
          thread.start()
          entered.wait(1)  # In vain, if the end of a block is one step.
          unwatch()
        import_hook.unwatch = slow_unwatch
        with hooks.activated():
          pass
        assert entered.wait(60)
        leave.set()
        thread.join()
        assert not hooks.is_active()
        print(set(states) - {"not needed"})
    """)
    self.assertEqual(out.strip(), "{'applied'}")

  def test_an_interrupt_at_any_line_leaves_all_or_nothing(self):
    # Ctrl-C at every line of the engine, its ledger and the hooks, one by one.
    out = child.check_output(_INTERRUPTS)
    lines, bad = out.split(maxsplit=1)
    self.assertGreater(int(lines), 300)
    self.assertEqual(bad.strip(), "[]")

  def test_get_original(self):
    out = child.check_output("""
        from jax.experimental.pallas import mosaic_gpu as plgpu
        import os
        import jax_mgpu_ext
        from jax_mgpu_ext import hooks
        from jax._src.pallas.mosaic_gpu import core
        hooked = plgpu.kernel
        original = hooks.get_original(hooked)
        assert original is not hooked
        assert original.__module__ == core.__name__
        assert not hasattr(original, "__wrapped__")
        name = "jax._src.pallas.mosaic_gpu.core"
        assert hooks.get_original(name + ":kernel") is original
        assert hooks.get_original(name + ".kernel") is original
        init = hooks.get_original(name + ":RefUnion.__init__")
        assert init is not plgpu.RefUnion.__init__
        assert hooks.get_original(name + ".align_to") is core.align_to
        assert hooks.get_original(len) is len
        hooks.deactivate()
        assert plgpu.kernel is original
        assert hooks.get_original(original) is original
        try:
          hooks.get_original(name + ":banana")
        except AttributeError as e:
          print(e)
    """)
    self.assertIn("banana", out)

  def test_activated_restores_the_state_before(self):
    child.check_output("""
        import jax_mgpu_ext
        from jax_mgpu_ext import hooks
        with jax_mgpu_ext.activated():
          assert hooks.is_active()
        assert hooks.is_active()
        jax_mgpu_ext.deactivate()
        jax_mgpu_ext.deactivate()
        try:
          with jax_mgpu_ext.activated():
            assert hooks.is_active()
            raise KeyError
        except KeyError:
          pass
        assert not hooks.is_active()
    """)

  def test_threads(self):
    # Importing and activating in many threads at once neither deadlocks nor
    # applies anything twice.
    out = child.check_output("""
        import importlib, sys, threading
        sys.setswitchinterval(1e-5)
        import jax
        names = ["jax_mgpu_ext", "jax.experimental.pallas",
                 "jax.experimental.pallas.mosaic_gpu"] * 5
        failures = []
        def work(name):
          try:
            importlib.import_module(name)
            import jax_mgpu_ext
            jax_mgpu_ext.activate()
          except BaseException as e:
            failures.append(e)
        threads = [threading.Thread(target=work, args=(n,)) for n in names]
        [t.start() for t in threads]
        [t.join() for t in threads]
        assert not failures, failures
        import jax_mgpu_ext
        from jax.experimental.pallas import mosaic_gpu as plgpu
        from jax._src.pallas.mosaic_gpu.interpret import jaxpr_interpret  # For its hook.
        assert {s.state for s in jax_mgpu_ext.status()} <= {"applied", "not needed"}
        depth, f = 0, plgpu.kernel
        while hasattr(f, "__wrapped__"):
          depth, f = depth + 1, f.__wrapped__
        jax_mgpu_ext.deactivate()
        assert plgpu.kernel is f
        print(depth)
    """)
    self.assertEqual(out.strip(), "4")


if __name__ == "__main__":
  absltest.main()
