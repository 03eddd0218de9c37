"""What a target refuses, and that it refuses nothing else."""

from __future__ import annotations

from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax._src import core as jax_core
from jax._src.pallas.mosaic_gpu import primitives as mgpu_primitives
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from jax_mgpu_ext import budget
from jax_mgpu_ext import SpecError
from jax_mgpu_ext._src import refusals
from jax_mgpu_ext._src import targets
from tests import lowering

_F16 = jnp.float16
_TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))

# Which release has which of the names in the tables; all others are in all.
_SINCE: dict[str, tuple[int, ...]] = {}
# Primitives whose names look like those of the tables, and why they are not.
_EXCEPTIONS: dict[str, str] = {}


def _trace(body, scratch=(), shape=(128, 128), dtype=_F16, **kwargs):
  kernel = plgpu.kernel(
      body, out_type=jax.ShapeDtypeStruct(shape, dtype), scratch_types=scratch,
      **kwargs,
  )
  return jax.jit(kernel).trace(jnp.zeros(shape, dtype))


def _copy(x, o, *unused, **refs):
  del refs
  o[...] = x[...]


def _hopper(x, o, lhs, rhs, done):
  plgpu.copy_gmem_to_smem(x, lhs, done)
  plgpu.barrier_wait(done)

  def multiply(acc):
    plgpu.wgmma(acc, lhs, rhs)
    return acc[...]

  o[...] = pl.run_scoped(multiply, plgpu.ACC((64, 64))).astype(o.dtype)


def hopper():
  tile = plgpu.SMEM((64, 64), _F16, transforms=_TILED)
  return _trace(
      _hopper, [tile, tile, plgpu.Barrier(num_barriers=())], (64, 64)
  )


def _blackwell(x, o, tile, acc, done):
  del x
  plgpu.tcgen05_mma(acc, tile, tile, done, accumulate=False)
  plgpu.barrier_wait(done)
  o[...] = plgpu.async_load_tmem(acc).astype(o.dtype)


def blackwell():
  return _trace(
      _blackwell,
      dict(
          tile=plgpu.SMEM((128, 128), _F16, transforms=_TILED),
          acc=plgpu.TMEM((128, 128), jnp.float32),
          done=plgpu.Barrier(num_barriers=(), orders_tensor_core=True),
      ),
  )


def plain(scratch=(), **kwargs):
  return lambda: _trace(_copy, scratch, (128,), jnp.float32, **kwargs)


def _cluster(size):
  return dict(cluster=(size,), cluster_names=("x",))


class RefusalsTest(parameterized.TestCase):

  # What is compiled, for what, and what is said of it: (code, path).
  @parameterized.named_parameters(
      ("hopper", hopper, "h100", []),
      ("hopper_h200", hopper, "h200", []),
      ("blackwell", blackwell, "b200", []),
      ("blackwell_gb300", blackwell, "gb300", []),
      ("hopper_on_blackwell", hopper, "b200",
       [("MGPU107", "acc"), ("MGPU107", "refusals_test.py:{wgmma}"),
        ("MGPU107", "refusals_test.py:{deref}")]),
      ("hopper_on_workstation", hopper, "rtx_pro_6000",
       [("MGPU107", "acc"), ("MGPU107", "refusals_test.py:{wgmma}"),
        ("MGPU107", "refusals_test.py:{deref}")]),
      ("blackwell_on_hopper", blackwell, "h100",
       [("MGPU106", "acc"), ("MGPU108", "done"),
        ("MGPU106", "refusals_test.py:{mma}"),
        ("MGPU106", "refusals_test.py:{load}")]),
      ("cluster", plain(**_cluster(16)), "h100", []),
      ("cluster_over", plain(**_cluster(16)), "rtx_pro_6000",
       [("MGPU103", "cluster")]),
      ("threads", plain(num_threads=8, thread_name="t"), "h100", []),
      ("threads_over", plain(num_threads=9, thread_name="t"), "b200",
       [("MGPU104", "num_threads")]),
      ("smem", plain([plgpu.SMEM((227, 1024), jnp.int8)]), "h100", []),
      ("smem_over", plain(dict(a=plgpu.SMEM((228, 1024), jnp.int8))), "h100",
       [("MGPU101", "refs['a']")]),
      ("tmem", plain([plgpu.TMEM((128, 512), jnp.float32)]), "b200", []),
      ("tmem_over", plain(dict(
          a=plgpu.TMEM((128, 512), jnp.float32),
          b=plgpu.TMEM((128, 32), jnp.float32),
      )), "b200", [("MGPU102", "refs['a']")]),
      ("accumulator", plain(dict(a=plgpu.ACC((64, 256)))), "h100", []),
      ("ordered_cluster_barrier", plain(
          dict(a=plgpu.ClusterBarrier(
              collective_axes=("x",), num_barriers=1, orders_tensor_core=True)),
          **_cluster(2)), "h100", [("MGPU108", "refs['a']")]),
      ("plain_cluster_barrier", plain(
          dict(a=plgpu.ClusterBarrier(collective_axes=("x",), num_barriers=1)),
          **_cluster(2)), "h100", []),
      ("order", plain(
          dict(
              a=plgpu.SMEM((227, 1024), jnp.int8),
              b=plgpu.TMEM((128, 32), jnp.float32),
          ),
          num_threads=9, thread_name="t", **_cluster(16)), "rtx_pro_6000",
       [("MGPU103", "cluster"), ("MGPU104", "num_threads"),
        ("MGPU106", "refs['b']"), ("MGPU101", "refs['a']")]),
  )
  def test_refusals(self, make, target, want):
    lines = _lines()
    traced = make()
    found = budget.refusals(traced, target)
    # Reading an accumulator takes a wait too; each is said of its line.
    places = list(dict.fromkeys((e.code, e.path) for e in found))
    self.assertEqual(places, [(c, p.format(**lines)) for c, p in want])
    for error in found:
      self.assertIsInstance(error, SpecError)
      self.assertTrue(error.hint)
      self.assertIn(target, error.problem)
    if not want:
      refusals.check(traced, target)
      self.assertTrue(budget.budget_kernel(traced, target).fits)
      return
    with self.assertRaises(SpecError) as caught:
      refusals.check(traced, target)
    self.assertEqual(
        (caught.exception.code, caught.exception.path),
        (found[0].code, found[0].path),
    )

  def test_accumulators_that_spill_are_not_refused(self):
    # They do compile; the budget is what tells.
    traced = plain(dict(a=plgpu.ACC((128, 256))))()
    self.assertEqual(budget.refusals(traced, "h100"), ())
    [error] = budget.budget_kernel(traced, "h100").over
    self.assertEqual((error.code, error.path), ("MGPU105", "refs['a']"))

  def test_budget_has_the_same_codes(self):
    for make, target in ((hopper, "b200"), (blackwell, "h100")):
      traced = make()
      self.assertLessEqual(
          {e.code for e in budget.budget_kernel(traced, target).over},
          {e.code for e in budget.refusals(traced, target)},
      )

  def test_all_kernels_of_a_program(self):
    def program(x):
      for _ in range(2):
        x = plgpu.kernel(
            _copy, out_type=lowering.array(),
            scratch_types=dict(acc=plgpu.ACC((64, 8))),
        )(x)
      return x

    traced = jax.jit(program).trace(jnp.zeros((128,)))
    self.assertLen(budget.refusals(traced, "b200"), 2)
    self.assertEmpty(budget.refusals(traced, "h100"))
    [first, _] = budget.kernel_calls(traced)
    self.assertLen(budget.refusals(first, "b200"), 1)

  def test_unknown_target_and_program(self):
    with self.assertRaisesRegex(ValueError, "unknown target 'h1000'"):
      budget.refusals(plain()(), "h1000")
    with self.assertRaisesRegex(TypeError, "a traced program"):
      budget.refusals(_copy, "h100")
    self.assertEqual(budget.refusals(plain()(), targets.get("h100")), ())

  def test_lowering_goes_on_taking_all(self):
    # On a machine without a GPU nobody has named a target.
    for specs in (
        plgpu.TMEM((128, 32), jnp.float32), plgpu.ACC((64, 8)),
        plgpu.Barrier(num_barriers=1, orders_tensor_core=True),
    ):
      traced = plain(dict(a=specs))()
      traced.lower(lowering_platforms=("cuda",))
      refused = [
          target
          for target in targets.names()
          if budget.refusals(traced, target)
      ]
      self.assertNotEmpty(refused)


def _lines() -> dict[str, int]:
  """Returns the lines of this file in which the kernels multiply and read."""
  with open(__file__, encoding="utf-8") as file:
    lines = [line.strip() for line in file]
  return {
      name: lines.index(line) + 1
      for name, line in dict(
          wgmma="plgpu.wgmma(acc, lhs, rhs)",
          deref="return acc[...]",
          mma="plgpu.tcgen05_mma(acc, tile, tile, done, accumulate=False)",
          load="o[...] = plgpu.async_load_tmem(acc).astype(o.dtype)",
      ).items()
  }


class PrimitivesTest(absltest.TestCase):

  def test_every_name_exists(self):
    # With the suite run on every release, a name that is in none fails in all.
    found = {name for name, _ in refusals.primitives().values()}
    want = {
        name
        for name in (*refusals.TCGEN05, *refusals.WGMMA)
        if lowering.version() >= _SINCE.get(name, ())
    }
    self.assertEqual(found, want)

  def test_none_is_forgotten(self):
    known = refusals.primitives()
    for attribute, value in vars(mgpu_primitives).items():
      if isinstance(value, jax_core.Primitive) and any(
          word in text
          for word in ("tcgen05", "tmem", "wgmma")
          for text in (attribute, value.name)
      ):
        if attribute not in _EXCEPTIONS:
          self.assertIn(value, known, attribute)
    self.assertNotEmpty(known)

  def test_no_name_is_in_both(self):
    names = (*refusals.TCGEN05, *refusals.WGMMA)
    self.assertLen(set(names), len(names))


if __name__ == "__main__":
  absltest.main()
