"""The extractor: every spec type, both questions, trees, and registration."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle

from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax._src import core as jax_core
from jax._src import state
from jax._src.pallas import core as pallas_core
from jax._src.pallas.mosaic_gpu import core
from jax._src.state import types as state_types
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np

import jax_mgpu_ext
from jax_mgpu_ext import avals
from jax_mgpu_ext import hooks
from jax_mgpu_ext._src import errors
from tests import lowering
from tests.lowering import array
from tests.lowering import F32

_TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
_MESH = plgpu.Mesh(grid=(2,), grid_names=("g",))

# name -> (spec, type of the ref aval, memory space, shape, whether an array).
SPECS = {
    "barrier": (
        plgpu.Barrier(num_barriers=2), state.AbstractRef, plgpu.SMEM, (2,),
        False,
    ),
    "cluster_barrier": (
        plgpu.ClusterBarrier(collective_axes=("x",), num_barriers=(2, 3)),
        state.AbstractRef, plgpu.SMEM, (2, 3), False,
    ),
    "gmem": (
        plgpu.GMEM((8,), F32), state.AbstractRef, plgpu.GMEM, (8,), True
    ),
    "smem": (
        plgpu.SMEM((8, 64), F32), state.AbstractRef, plgpu.SMEM, (8, 64), True
    ),
    "tiled_smem": (
        plgpu.SMEM((16, 128), jnp.float16, transforms=_TILED),
        state_types.TransformedRef, plgpu.SMEM, (16, 128), True,
    ),
    "tmem": (
        plgpu.TMEM((128, 64), F32), core.AbstractTMEMRef, plgpu.TMEM,
        (128, 64), True,
    ),
    "regs": (
        plgpu.REGS((8,), F32), state.AbstractRef, plgpu.REGS, (8,), True
    ),
    "ref_union": (
        plgpu.RefUnion(plgpu.SMEM((8,), F32), plgpu.SMEM((16,), F32)),
        core.AbstractRefUnion, plgpu.SMEM, (64,), True,
    ),
    "tmem_union": (
        plgpu.RefUnion(plgpu.TMEM((128, 64), F32)), core.AbstractRefUnion,
        plgpu.TMEM, (128, 64), True,
    ),
    "accumulator": (
        plgpu.ACC((64, 64)), core.WGMMAAbstractAccumulatorRef, plgpu.REGS,
        (64, 64), False,
    ),
    "semaphore": (
        plgpu.SemaphoreType.REGULAR, state.AbstractRef, plgpu.GMEM, (), True
    ),
    "barrier_semaphore": (
        plgpu.SemaphoreType.BARRIER, state.AbstractRef, plgpu.GMEM, (), True
    ),
    "semaphores": (
        plgpu.SemaphoreType.REGULAR((2,)), state.AbstractRef, plgpu.GMEM, (2,),
        True,
    ),
    "cancel_result": (
        plgpu.TryClusterCancelResult(2), state.AbstractRef, plgpu.SMEM, (2, 16),
        True,
    ),
    "plain_memory_ref": (
        pl.MemoryRef(jax_core.ShapedArray((8,), jnp.dtype(F32)), plgpu.SMEM)
        if hasattr(pl, "MemoryRef")
        else pallas_core.MemoryRef(
            jax_core.ShapedArray((8,), jnp.dtype(F32)), plgpu.SMEM
        ),
        state.AbstractRef, plgpu.SMEM, (8,), True,
    ),
}


def _named():
  return [(name, name) for name in SPECS]


class Ring:
  """A spec type of some other library: knows nothing of JAX's protocol."""

  def __init__(self, num_stages: int):
    self.num_stages = num_stages

  def smem(self):
    return plgpu.SMEM((self.num_stages, 128), F32)


class DeepRing(Ring):
  pass


class QuestionsTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    jax_mgpu_ext.activate()
    self.addCleanup(jax_mgpu_ext.activate)

  @parameterized.named_parameters(_named())
  def test_ref_aval(self, name):
    spec, kind, space, shape, _ = SPECS[name]
    aval = avals.ref_aval(spec)
    self.assertIs(type(aval), kind)
    self.assertEqual(aval.shape, shape)
    inner = aval.ref if isinstance(aval, state_types.TransformedRef) else aval
    self.assertEqual(inner.memory_space, space)

  @parameterized.named_parameters(_named())
  def test_equal_to_upstream(self, name):
    spec, *_, is_array = SPECS[name]
    jax_mgpu_ext.deactivate()
    self.assertEqual(avals.ref_aval(spec), spec.get_ref_aval())
    self.assertEqual(core.Barrier().get_ref_aval(), avals.ref_aval(
        core.Barrier()))
    if is_array:
      self.assertEqual(avals.array_aval(spec), spec.get_array_aval())
    self.assertFalse(hooks.is_active())

  @parameterized.product(name=list(SPECS), active=[True, False])
  def test_array_aval_or_the_documented_error(self, name, active):
    spec, _, space, shape, is_array = SPECS[name]
    if not active:
      jax_mgpu_ext.deactivate()
    if is_array:
      aval = avals.array_aval(spec)
      self.assertIsInstance(aval, jax_core.ShapedArray)
      self.assertEqual((aval.shape, aval.memory_space), (shape, space))
    else:
      with self.assertRaisesRegex(errors.SpecError, "are not arrays") as e:
        avals.array_aval(spec)
      self.assertIs(e.exception.spec, spec)
      self.assertIn("get_ref_aval", e.exception.hint)
    self.assertEqual(avals.is_array_spec(spec), is_array)

  @parameterized.named_parameters(_named())
  def test_stable(self, name):
    spec = SPECS[name][0]
    aval = avals.ref_aval(spec)
    self.assertEqual(avals.ref_aval(copy.copy(spec)), aval)
    self.assertEqual(avals.ref_aval(aval), aval)  # Its own answer.
    self.assertEqual(
        avals.ref_avals([spec, {"a": spec}, None]), [aval, {"a": aval}, None]
    )

  @parameterized.named_parameters(
      ("shape_dtype_struct", array(8), errors.NotASpecError, "MGPU001"),
      ("array", np.zeros(8), errors.NotASpecError, "MGPU001"),
      ("number", 3, errors.NotASpecError, "MGPU001"),
      ("text", "x", errors.NotASpecError, "MGPU001"),
      ("class", plgpu.Barrier, errors.SpecTypeError, "MGPU002"),
      ("memory_space", plgpu.SMEM, errors.NotASpecError, "MGPU001"),
  )
  def test_no_ref(self, value, kind, code):
    with self.assertRaises(kind) as e:
      avals.ref_aval(value)
    self.assertEqual(e.exception.code, code)
    self.assertIs(e.exception.spec, value)

  def test_array_types_have_array_avals(self):
    self.assertEqual(avals.array_aval(array(8)).shape, (8,))
    self.assertEqual(avals.array_aval(np.zeros((2, 3))).shape, (2, 3))
    for value in (3, "x", plgpu.Barrier, jnp.float32):
      with self.subTest(value=value):
        with self.assertRaisesRegex(errors.SpecError, "Invalid out_shape") as e:
          avals.array_aval(value)
        self.assertEqual(e.exception.code, "MGPU013")

  @parameterized.product(
      active=[True, False],
      spec=[
          plgpu.SMEM((9, 64), F32, transforms=(
              plgpu.TilingTransform((8, 64)),)),
          plgpu.SMEM((8, 32), jnp.float16, transforms=(
              plgpu.SwizzleTransform(128),)),
          plgpu.ACC.init(np.zeros((64, 64), np.float32)),
      ],
  )
  def test_what_jax_refuses_is_a_spec_error(self, active, spec):
    if not active:
      jax_mgpu_ext.deactivate()
    try:
      with hooks_off():
        spec.get_ref_aval()
    except Exception as e:  # pylint: disable=broad-exception-caught
      upstream = type(e)
    with self.assertRaises(errors.SpecError) as caught:
      avals.ref_aval(spec)
    self.assertIsInstance(caught.exception, upstream)

  def test_protocol_types_answer_for_themselves(self):
    class Foreign:

      def get_ref_aval(self):
        return state.AbstractRef(jax_core.ShapedArray((3,), jnp.dtype(F32)))

    self.assertEqual(avals.ref_aval(Foreign()).shape, (3,))
    with self.assertRaises(errors.SpecError):
      avals.array_aval(Foreign())

  def test_unhashable_specs(self):
    # An accumulator with an array cannot be hashed, and so not be cached.
    spec = core.WGMMAAccumulatorRef((64, 64), F32, np.zeros((64, 64)))
    with self.assertRaisesRegex(ValueError, "Preinitialized"):
      avals.ref_aval(spec)

  def test_mutable_subclasses_are_asked_each_time(self):
    class Growing(core.Barrier):
      stages = 1

      def get_ref_aval(self):
        type(self).stages += 1
        return state.AbstractRef(
            jax_core.ShapedArray((type(self).stages,), jnp.dtype(F32))
        )

    spec = Growing()
    self.assertNotEqual(
        avals.ref_aval(spec).shape, avals.ref_aval(spec).shape
    )
    plain = core.Barrier()
    self.assertIs(avals.ref_aval(plain), avals.ref_aval(plain))

  def test_specs_are_not_kept_alive(self):
    from jax_mgpu_ext._src import avals as engine  # pylint: disable=g-import-not-at-top
    specs = [plgpu.SMEM((i, 8), F32) for i in range(1, 1001)]
    avals.ref_avals(specs)
    known = len(engine._known)  # pylint: disable=protected-access
    self.assertGreaterEqual(known, 1000)
    del specs
    gc.collect()
    self.assertLessEqual(len(engine._known), known - 1000)  # pylint: disable=protected-access

  def test_predicates(self):
    barrier = plgpu.Barrier()
    cluster = plgpu.ClusterBarrier(collective_axes=("x",))
    others = [SPECS["smem"][0], SPECS["accumulator"][0], 3, None, array()]
    for convert in (lambda x: x, avals.ref_aval):
      self.assertTrue(avals.is_barrier(convert(barrier)))
      self.assertTrue(avals.is_barrier(convert(cluster)))
      self.assertFalse(avals.is_cluster_barrier(convert(barrier)))
      self.assertTrue(avals.is_cluster_barrier(convert(cluster)))
    for other in others:
      self.assertFalse(avals.is_barrier(other))
      self.assertFalse(avals.is_cluster_barrier(other))


def hooks_off():
  """A `with` block without hooks."""
  return _HooksOff()


class _HooksOff:

  def __enter__(self):
    self._was_active = hooks.is_active()
    hooks.deactivate()

  def __exit__(self, *_):
    if self._was_active:
      hooks.activate()


class TreeTest(parameterized.TestCase):

  @parameterized.parameters(
      ([array()], "specs[0]"),
      ({"a": [plgpu.Barrier(), (array(),)]}, "specs['a'][1][0]"),
      (array(), "specs"),
      ([None, plgpu.Barrier(), 3], "specs[2]"),  # None keeps its place.
  )
  def test_path(self, tree, path):
    with self.assertRaises(errors.SpecError) as e:
      avals.ref_avals(tree)
    self.assertEqual(e.exception.path, path)
    self.assertIn(f"(at {path})", str(e.exception))

  def test_path_in_a_registered_dataclass(self):
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Pair:
      full: object
      empty: object

    tree = dict(ring=Pair(full=plgpu.Barrier(), empty=array()))
    with self.assertRaises(errors.SpecError) as e:
      avals.ref_avals(tree, root="scratch_types")
    self.assertEqual(e.exception.path, "scratch_types['ring'].empty")
    tree["ring"].empty = plgpu.Barrier()
    found = avals.ref_avals(tree)
    self.assertIsInstance(found["ring"], Pair)

  def test_array_avals_path(self):
    with self.assertRaises(errors.SpecError) as e:
      avals.array_avals([array(), [plgpu.Barrier()]], root="out_type")
    self.assertEqual(e.exception.path, "out_type[1][0]")

  def test_partition_and_merge(self):
    smem, barrier = plgpu.SMEM((8,), F32), plgpu.Barrier()
    acc = plgpu.ACC((64, 64))
    tree = [smem, dict(a=barrier, b=[acc, smem]), None]
    arrays, rest = avals.partition_specs(tree)
    self.assertEqual(arrays, [smem, dict(a=None, b=[None, smem]), None])
    self.assertEqual(rest, [None, dict(a=barrier, b=[acc, None]), None])
    self.assertEqual(avals.merge_specs(arrays, rest), tree)
    self.assertEqual(avals.merge_specs(rest, arrays), tree)
    with self.assertRaisesRegex(ValueError, r"two at specs\[0\]"):
      avals.merge_specs(arrays, arrays)

  def test_errors_survive_pickling(self):
    for tree in ([array()], [plgpu.Barrier]):
      with self.assertRaises(errors.SpecError) as e:
        avals.ref_avals(tree)
      again = pickle.loads(pickle.dumps(e.exception))
      self.assertIs(type(again), type(e.exception))
      self.assertEqual(str(again), str(e.exception))
    with self.assertRaises(errors.SpecError) as e:
      avals.ref_aval(plgpu.ACC.init(np.zeros((64, 64))))
    again = pickle.loads(pickle.dumps(e.exception))
    self.assertEqual(str(again), str(e.exception))

  def test_many_leaves(self):
    tree = [plgpu.SMEM((8,), F32), [plgpu.Barrier()] * 9999]
    self.assertLen(avals.ref_avals(tree)[1], 9999)


class RegistrationTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    jax_mgpu_ext.activate()
    self.addCleanup(jax_mgpu_ext.activate)

  def _register(self, cls=Ring, **answers):
    answers = answers or dict(ref_aval=lambda s: avals.ref_aval(s.smem()))
    avals.register_spec(cls, **answers)
    self.addCleanup(avals.unregister_spec, cls)

  def test_answers(self):
    with self.assertRaises(errors.NotASpecError):
      avals.ref_aval(Ring(2))
    self._register()
    self.assertEqual(avals.ref_aval(Ring(2)).shape, (2, 128))
    with self.assertRaisesRegex(errors.SpecError, "Ring specs are not arrays"):
      avals.array_aval(Ring(2))
    self.assertFalse(avals.is_array_spec(Ring(2)))

  def test_documented_error_as_answer(self):
    self._register(
        ref_aval=lambda s: avals.ref_aval(s.smem()),
        array_aval="Rings are not arrays: take ring.data",
    )
    with self.assertRaisesRegex(ValueError, "take ring.data"):
      avals.array_aval(Ring(2))

  def test_dispatch_follows_the_mro(self):
    self._register()
    self.assertEqual(avals.ref_aval(DeepRing(3)).shape, (3, 128))
    self._register(DeepRing, ref_aval="DeepRing is too deep")
    with self.assertRaisesRegex(errors.SpecError, "too deep"):
      avals.ref_aval(DeepRing(3))
    self.assertEqual(avals.ref_aval(Ring(3)).shape, (3, 128))

  @parameterized.parameters(
      (lambda s: None, "None"), (lambda s: s.smem(), "SMEM"),
      (lambda s: array(8), "float32"), (lambda s: 1, "1"),
  )
  def test_answers_that_are_no_ref_avals(self, answer, says):
    self._register(ref_aval=answer)
    with self.assertRaisesRegex(errors.SpecError, f"got .*{says}") as e:
      avals.ref_aval(Ring(2))
    self.assertEqual(e.exception.code, "MGPU006")

  def test_errors_of_a_registered_function(self):
    class Odd(ValueError):

      def __init__(self, first, second):
        super().__init__(first, second)

    def answer(spec):
      del spec  # Unused.
      raise Odd("first\nline", 2)

    self._register(ref_aval=answer)
    with self.assertRaisesRegex(errors.SpecError, "registered for Ring") as e:
      avals.ref_aval(Ring(2))
    self.assertIsInstance(e.exception, Odd)
    self.assertNotIn("\n", str(e.exception))

  def test_a_registered_spec_in_a_container_that_looks_at_it(self):
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Holder:
      ring: object

      def __post_init__(self):
        assert hasattr(self.ring, "num_stages") or hasattr(self.ring, "shape")

    self._register()
    lowering.lower([Holder(Ring(2))])

  def test_duplicates(self):
    self._register()
    with self.assertRaises(errors.RegistrationError) as e:
      avals.register_spec(Ring, ref_aval=lambda s: None)
    self.assertEqual(e.exception.code, "MGPU080")
    with self.assertRaises(errors.RegistrationError) as e:
      avals.register_spec(plgpu.Barrier, ref_aval=lambda s: None)
    self.assertEqual(e.exception.code, "MGPU080")
    avals.register_spec(Ring, ref_aval="none", override=True)
    with self.assertRaisesRegex(errors.SpecError, "none"):
      avals.ref_aval(Ring(2))

  def test_override_of_a_type_of_jax_and_back(self):
    before = avals.ref_aval(plgpu.Barrier())
    wide = state.AbstractRef(jax_core.ShapedArray((7,), jnp.dtype(F32)))
    avals.register_spec(
        plgpu.Barrier, ref_aval=lambda s: wide, override=True
    )
    try:
      self.assertIs(avals.ref_aval(plgpu.Barrier()), wide)
    finally:
      avals.unregister_spec(plgpu.Barrier)
    self.assertEqual(avals.ref_aval(plgpu.Barrier()), before)

  @parameterized.parameters(
      (lambda: avals.register_spec(Ring(2)), "class"),
      (lambda: avals.register_spec(Ring, ref_aval=3), "ref_aval=3"),
      (lambda: avals.register_spec(Ring, array_aval=[]), r"array_aval=\[\]"),
      (lambda: avals.unregister_spec(Ring), "registered"),
      (lambda: avals.unregister_spec(plgpu.Barrier), "registered"),
  )
  def test_bad_calls(self, call, says):
    with self.assertRaisesRegex(errors.RegistrationError, says) as e:
      call()
    self.assertEqual(e.exception.code, "MGPU081")

  def test_registry_is_installed_in_jax(self):
    self.assertIs(core.register_spec, avals.register_spec)
    self.assertIs(core.ref_aval_of, avals.ref_aval)
    self.assertIs(core.array_aval_of, avals.array_aval)
    jax_mgpu_ext.deactivate()
    self.assertFalse(hasattr(core, "register_spec"))


class RoutingTest(absltest.TestCase):
  """A registered type works wherever JAX derives an aval."""

  def setUp(self):
    super().setUp()
    jax_mgpu_ext.activate()
    avals.register_spec(
        Ring,
        ref_aval=lambda s: avals.ref_aval(s.smem()),
        array_aval=lambda s: jax_core.ShapedArray(
            (s.num_stages, 128), jnp.dtype(F32)
        ),
    )
    self.addCleanup(avals.unregister_spec, Ring)

  def _body(self, shape=(2, 128)):
    def body(x, o, ring):
      assert ring.shape == shape, ring
      ring[0] = x[...]
      o[...] = ring[0]
    return body

  def test_plgpu_kernel(self):
    lowering.lower([Ring(2)], body=self._body())
    lowering.lower(dict(ring=Ring(3)), body=lambda x, o, ring: None)

  def test_run_scoped(self):
    def body(x, o):
      pl.run_scoped(lambda ring: self._body()(x, o, ring), Ring(2))
      pl.run_scoped(
          lambda *, ring: self._body((3, 128))(x, o, ring), ring=Ring(3)
      )
    lowering.lower(body=body)

  def test_scratch_shapes_of_a_grid(self):
    for kwargs in (
        dict(scratch_shapes=[Ring(2)]),
        dict(grid_spec=pl.GridSpec(grid=(1,), scratch_shapes=[Ring(2)])),
    ):
      jax.jit(pl.pallas_call(
          self._body(), out_shape=array(), **kwargs
      )).trace(jnp.zeros((128,), F32))

  def test_grid_spec_is_not_changed(self):
    ring = Ring(2)
    spec = pl.GridSpec(grid=(1,), scratch_shapes=[ring])
    for _ in range(2):
      jax.jit(pl.pallas_call(
          self._body(), out_shape=array(), grid_spec=spec
      )).trace(jnp.zeros((128,), F32))
    self.assertIs(spec.scratch_shapes[0], ring)

  def test_pl_kernel(self):
    kernel = pl.kernel(
        self._body(), out_type=array(), mesh=_MESH, scratch_types=[Ring(2)]
    )
    try:
      jax.jit(kernel).trace(jnp.zeros((128,), F32))
    except NotImplementedError as e:
      self.assertIn("scratch", str(e).lower())  # Some releases lack it.

  def test_out_type(self):
    def body(x, o):
      o[0] = x[...]
    lowering.lower(out=Ring(2), body=body)
    traced = jax.jit(pl.pallas_call(
        lambda x, o: None, out_shape=Ring(2)
    )).trace(jnp.zeros((128,), F32))
    self.assertEqual(traced.out_info.shape, (2, 128))

  def test_not_routed_without_hooks(self):
    jax_mgpu_ext.deactivate()
    self.addCleanup(jax_mgpu_ext.activate)
    with self.assertRaises(AttributeError):
      lowering.lower([Ring(2)], body=self._body())


class PlainPallasTest(absltest.TestCase):
  """What is not of Mosaic GPU goes on to JAX as it is."""

  def setUp(self):
    super().setUp()
    jax_mgpu_ext.activate()

  def test_tpu_specs_are_left_to_jax(self):
    from jax.experimental.pallas import tpu as pltpu  # pylint: disable=g-import-not-at-top
    from jax_mgpu_ext._src import avals as engine  # pylint: disable=g-import-not-at-top
    for spec in (pltpu.VMEM((8, 128), F32), pltpu.SemaphoreType.DMA):
      self.assertFalse(engine.is_routed(spec))
      self.assertEqual(avals.ref_aval(spec), spec.get_ref_aval())
    jax.jit(pl.pallas_call(
        lambda x, o, scratch, sem: None, out_shape=array(8, 128),
        scratch_shapes=[pltpu.VMEM((8, 128), F32), pltpu.SemaphoreType.DMA],
    )).trace(jnp.zeros((8, 128), F32))

  def test_own_protocol_types_are_left_to_jax(self):
    class Foreign:

      def get_ref_aval(self):
        return state.AbstractRef(
            jax_core.ShapedArray((3,), jnp.dtype(F32)), plgpu.SMEM
        )

    lowering.lower([Foreign()])


if __name__ == "__main__":
  absltest.main()
