"""Composite specs: what they are made of, where they go, what they refuse."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np

import jax_mgpu_ext
from jax_mgpu_ext import avals
from jax_mgpu_ext import budget
from jax_mgpu_ext import specs
from jax_mgpu_ext._src import check_interpreter
from jax_mgpu_ext._src import composites
from tests import lowering

F16, F32 = jnp.float16, jnp.float32


def ring(**arguments):
  arguments = {"num_stages": 3, **arguments}
  return specs.RingBuffer(
      dict(a=plgpu.SMEM((8, 128), F32), b=plgpu.SMEM((4, 128), F16)),
      arguments.pop("num_stages"), **arguments,
  )


@specs.scratch_struct
class Scratch:
  """A bundle."""
  ring: Any
  out: Any
  more: Any = None


class PartsTest(parameterized.TestCase):
  """What a composite is made of."""

  @parameterized.named_parameters(
      ("plain", {}, 2, 1),
      ("producers", dict(num_producers=2), 4, 1),
      ("consumers", dict(num_consumers=2), 2, 2),
      ("transfers", dict(transfers_per_stage=3, num_producers=2), 12, 1),
      ("stores", dict(transfers_per_stage=0), 1, 1),
      ("stores_of_two", dict(transfers_per_stage=0, num_producers=2), 2, 1),
  )
  def test_arrivals(self, arguments, full, empty):
    spec = ring(**arguments)
    self.assertEqual(
        spec.full, plgpu.Barrier(num_arrivals=full, num_barriers=3)
    )
    self.assertEqual(
        spec.empty, plgpu.Barrier(num_arrivals=empty, num_barriers=3)
    )

  @parameterized.named_parameters(
      ("one", "x", (("x",), ("x",)), ("x",)),
      ("tuple", ("x", "y"), (("x", "y"),) * 2, ("x", "y")),
      ("mapping", dict(a="x", b=None), (("x",), ()), ("x",)),
      ("two", dict(a="x", b="y"), (("x",), ("y",)), ("x", "y")),
      ("none", None, ((), ()), None),
      ("none_of_them", dict(a=None, b=None), ((), ()), None),
  )
  def test_collective_axes(self, axes, of_leaves, together):
    spec = ring(collective_axes=axes, num_consumers=2)
    self.assertEqual(spec.collective_axes, of_leaves)
    if together is None:
      self.assertIsInstance(spec.empty, plgpu.Barrier)
    else:
      self.assertEqual(spec.empty, plgpu.ClusterBarrier(
          collective_axes=together, num_arrivals=2, num_barriers=3
      ))

  def test_data_has_stages(self):
    spec = specs.RingBuffer(specs.TiledSMEM((128, 64), F16), 4)
    self.assertEqual(spec.data.shape, (4, 128, 64))
    self.assertEqual(
        spec.data.transforms,
        (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)),
    )

  def test_repr(self):
    self.assertEqual(
        repr(ring(num_consumers=2, collective_axes=dict(a="x", b=None))),
        "RingBuffer({'a': SMEM((3, 8, 128), float32), 'b': SMEM((3, 4, 128),"
        " float16)}, num_stages=3, num_consumers=2,"
        " collective_axes=(('x',), ()))",
    )
    self.assertLess(len(repr(ring())), 120)

  def test_frozen_equal_hashable_and_copied(self):
    spec = specs.RingBuffer(plgpu.SMEM((8, 128), F32), 2)
    with self.assertRaises(dataclasses.FrozenInstanceError):
      spec.num_stages = 3
    same = specs.RingBuffer(plgpu.SMEM((8, 128), F32), 2)
    self.assertEqual(spec, same)
    self.assertNotEqual(spec, specs.RingBuffer(plgpu.SMEM((8, 128), F32), 3))
    self.assertEqual(hash(spec), hash(same))
    self.assertEqual(copy.deepcopy(spec), spec)

  def test_pytree(self):
    spec = Scratch(ring=ring(), out=plgpu.SMEM((8,), F32), more=[None])
    leaves, structure = jax.tree.flatten(spec)
    self.assertLen(leaves, 5)
    self.assertEqual(structure.unflatten(leaves), spec)
    paths = [
        jax.tree_util.keystr(path)
        for path, _ in jax.tree_util.tree_leaves_with_path(spec)
    ]
    self.assertEqual(
        paths,
        [".ring.data['a']", ".ring.data['b']", ".ring.full", ".ring.empty",
         ".out"],
    )
    # Whatever the parts become, the class stays.
    self.assertIsInstance(structure.unflatten(range(5)).ring, specs.RingBuffer)

  def test_struct_fields(self):
    with self.assertRaises(TypeError):
      Scratch(ring=1)  # pylint: disable=missing-kwoa
    with self.assertRaises(TypeError):
      Scratch(1, 2)  # pylint: disable=too-many-function-args


class TiledTest(parameterized.TestCase):

  @parameterized.named_parameters(
      ("f16", (128, 64), F16, "auto", (8, 64), 128),
      ("f16_wide", (128, 256), F16, "auto", (8, 64), 128),
      ("f16_narrow", (8, 32), F16, "auto", (8, 32), 64),
      ("f16_small", (8, 16), F16, "auto", (8, 16), 32),
      ("f16_none", (8, 8), F16, "auto", (8, 8), None),
      ("f32", (64, 32), F32, "auto", (8, 32), 128),
      ("f8", (64, 128), jnp.float8_e4m3fn, "auto", (8, 128), 128),
      ("i4", (64, 256), jnp.int4, "auto", (8, 256), 128),
      ("three", (3, 16, 64), F16, "auto", (8, 64), 128),
      ("chosen", (128, 64), F16, 64, (8, 32), 64),
      ("chosen_none", (128, 64), F16, 16, (8, 8), None),
  )
  def test_transforms(self, shape, dtype, swizzle, tiling, want):
    spec = specs.TiledSMEM(shape, dtype, swizzle=swizzle)
    transforms = (plgpu.TilingTransform(tiling),)
    if want is not None:
      transforms += (plgpu.SwizzleTransform(want),)
    self.assertEqual(spec, plgpu.SMEM(shape, dtype, transforms=transforms))
    avals.ref_aval(spec)

  def test_like(self):
    x = jnp.zeros((16, 64), F16)
    self.assertEqual(specs.TiledSMEM.like(x), specs.TiledSMEM((16, 64), F16))
    self.assertEqual(
        specs.TiledSMEM.like(x, swizzle=32),
        specs.TiledSMEM((16, 64), F16, swizzle=32),
    )

  def test_agrees_with_jax(self):
    for columns in range(8, 520, 8):
      spec = specs.TiledSMEM((8, columns), F16)
      swizzles = [t.swizzle for t in spec.transforms if hasattr(t, "swizzle")]
      self.assertEqual(
          (swizzles or [16])[0], plgpu.find_swizzle(columns * 16), columns
      )


class BarriersTest(absltest.TestCase):

  def test_maybe_cluster_barrier(self):
    self.assertEqual(
        specs.MaybeClusterBarrier(num_arrivals=2, num_barriers=3),
        plgpu.Barrier(num_arrivals=2, num_barriers=3),
    )
    self.assertEqual(
        specs.MaybeClusterBarrier(collective_axes=(), num_barriers=3),
        plgpu.Barrier(num_barriers=3),
    )
    self.assertEqual(
        specs.MaybeClusterBarrier(collective_axes=("x",), num_barriers=3),
        plgpu.ClusterBarrier(collective_axes=("x",), num_barriers=3),
    )

  def test_pair(self):
    pair = specs.BarrierPair(
        full=plgpu.Barrier(num_barriers=2), empty=plgpu.Barrier(num_barriers=2)
    )
    self.assertLen(jax.tree.leaves(pair), 2)
    self.assertEqual(
        avals.ref_aval(pair).full, avals.ref_aval(plgpu.Barrier(num_barriers=2))
    )


class ExtractorTest(absltest.TestCase):

  def test_ref_aval_is_the_tree_of_its_parts(self):
    spec = Scratch(ring=ring(), out=plgpu.SMEM((8,), F32))
    found = avals.ref_aval(spec)
    self.assertIsInstance(found, Scratch)
    self.assertIs(found.ring.data["a"], avals.ref_aval(spec.ring.data["a"]))
    self.assertEqual(jax.tree.leaves(avals.ref_avals(spec)),
                     jax.tree.leaves(found))
    self.assertEqual(spec.ring.get_ref_aval().full, found.ring.full)

  def test_array_aval_names_the_parts(self):
    for ask in (avals.array_aval, lambda spec: spec.get_array_aval()):
      with self.assertRaisesRegex(
          ValueError, r"RingBuffer specs are not arrays: .*data, full, empty"
      ) as caught:
        ask(ring())
      self.assertEqual(caught.exception.code, "MGPU120")

  def test_path_of_a_bad_part(self):
    spec = Scratch(ring=ring(), out=7)
    with self.assertRaises(jax_mgpu_ext.SpecError) as caught:
      avals.ref_avals(spec, root="scratch_types")
    self.assertEqual(caught.exception.path, "scratch_types.out")

  def test_composites_of_a_tree(self):
    tree = [dict(s=Scratch(ring=ring(), out=[ring()])), ring()]
    found = [
        jax.tree_util.keystr(path) for path, _ in composites.find(tree)
    ]
    self.assertEqual(
        found, ["[0]['s']", "[0]['s'].ring", "[0]['s'].out[0]", "[1]"]
    )

  def test_budget(self):
    found = budget.budget(dict(r=ring()))
    self.assertEqual(
        [row.path for row in found.rows if row.kind != "barrier"],
        ["specs['r'].data['a']", "specs['r'].data['b']"],
    )
    self.assertEqual(found.smem_bytes, 3 * 4096 + 3 * 1024 + 2 * 3 * 8)
    large = specs.RingBuffer(plgpu.SMEM((128, 128), F16), 8)
    self.assertFalse(budget.fits(large))
    self.assertIn("num_stages=7 fits", budget.budget(large).over[0].hint)


class MisuseTest(parameterized.TestCase):

  @parameterized.named_parameters(
      ("no_stages", lambda: ring(num_stages=0), "MGPU121", None,
       "num_stages must be at least 1, got num_stages=0"),
      ("many_stages", lambda: ring(num_stages=33), "MGPU121", None, "at most 32"),
      ("half_a_stage", lambda: ring(num_stages=1.5), "MGPU121", None, "integer"),
      ("true", lambda: ring(num_stages=True), "MGPU121", None, "integer"),
      ("consumers", lambda: ring(num_consumers=0), "MGPU121", None, "at least 1"),
      ("producers", lambda: ring(num_producers=-1), "MGPU121", None, "least 1"),
      ("transfers", lambda: ring(transfers_per_stage=-1), "MGPU121", None, "0"),
      ("reads", lambda: ring(consumer_reads="fast"), "MGPU121", None,
       "one of async, generic"),
      ("barrier", lambda: specs.RingBuffer(dict(a=plgpu.Barrier()), 2),
       "MGPU123", "data['a']", "got Barrier"),
      ("array", lambda: specs.RingBuffer([jnp.zeros(3)], 2), "MGPU123",
       "data[0]", "expected a memory ref in SMEM"),
      ("tmem", lambda: specs.RingBuffer(plgpu.TMEM((128, 64), F32), 2),
       "MGPU123", "data", "expected a memory ref in SMEM"),
      ("union", lambda: specs.RingBuffer(
          plgpu.RefUnion(plgpu.SMEM((8,), F32)), 2), "MGPU123", "data", "a memory ref"),
      ("accumulator", lambda: specs.RingBuffer(plgpu.ACC((64, 64)), 2),
       "MGPU123", "data", "expected a memory ref"),
      ("nothing", lambda: specs.RingBuffer([], 2), "MGPU123", None, "at least"),
      ("axes", lambda: ring(collective_axes=dict(a="x", c="y")), "MGPU121", None,
       "must have the keys of data"),
      ("same_axis_twice", lambda: ring(collective_axes=("x", "x")), "MGPU024",
       None, "must name each axis once"),
      ("swizzle", lambda: specs.TiledSMEM((8, 64), F16, swizzle=48), "MGPU122",
       None, "expected a swizzle of 128, 64, 32, 16"),
      ("narrow", lambda: specs.TiledSMEM((8, 32), F16, swizzle=128), "MGPU122",
       None, "expected a swizzle of 64, 32, 16"),
      ("odd", lambda: specs.TiledSMEM((8, 3), F16), "MGPU122", None, "no swizzle"),
      ("rows", lambda: specs.TiledSMEM((12, 64), F16), "MGPU122", None, "16 rows"),
      ("flat", lambda: specs.TiledSMEM((64,), F16), "MGPU122", None, "plgpu.SMEM"),
  )
  def test_construction(self, make, code, path, says):
    with self.assertRaises(jax_mgpu_ext.SpecError) as caught:
      make()
    error = caught.exception
    self.assertEqual((error.code, error.path), (code, path))
    self.assertIn(says, str(error))

  @parameterized.named_parameters(
      ("axis", lambda: [ring(collective_axes="x")], {}, "MGPU030",
       "scratch_types[0].empty"),
      ("other_axis", lambda: dict(s=Scratch(ring=ring(collective_axes="y"),
                                            out=None)),
       dict(cluster=(2,), cluster_names=("x",)), "MGPU030",
       "scratch_types['s'].ring.empty"),
      ("consumers", lambda: [Scratch(ring=ring(num_consumers=3), out=None)],
       dict(num_threads=2, thread_name="wg"), "MGPU124",
       "scratch_types[0].ring"),
      ("producers", lambda: [ring(num_producers=2)], {}, "MGPU124",
       "scratch_types[0]"),
  )
  def test_kernel(self, make, arguments, code, path):
    with self.assertRaises(jax_mgpu_ext.SpecError) as caught:
      lowering.lower(make(), **arguments)
    self.assertEqual(
        (caught.exception.code, caught.exception.path), (code, path)
    )

  @parameterized.named_parameters(
      ("axis", lambda: [ring(collective_axes="x")],
       dict(cluster=(2,), cluster_names=("x",))),
      ("consumers", lambda: [Scratch(ring=ring(num_consumers=2), out=None)],
       dict(num_threads=2, thread_name="wg")),
      ("named", lambda: dict(r=ring(), s=Scratch(ring=[ring()], out=None)), {}),
  )
  def test_good_kernel(self, make, arguments):
    lowering.lower(make(), **arguments)


class UseTest(parameterized.TestCase):
  """What the kernel's body does with a ring that was not made for it."""

  def _trace(self, use, **arguments):
    def body(x, o, found):
      del o
      use(found, x)

    kernel = plgpu.kernel(
        body,
        out_type=lowering.array(),
        scratch_types=[
            specs.RingBuffer(plgpu.SMEM((128,), F32), 2, **arguments)
        ],
    )
    jax.eval_shape(kernel, jax.ShapeDtypeStruct((128,), F32))

  @parameterized.named_parameters(
      ("commit", lambda r, x: r.producer_commit(0), {}, "producer_commit is for"),
      ("copy", lambda r, x: r.copy_in(x, step=0), dict(transfers_per_stage=0),
       "copy_in is for"),
      ("negative", lambda r, x: r.stage(-1), {}, "counted from 0, got step=-1"),
      ("numpy", lambda r, x: r.stage(np.int32(-1)), {}, "counted from 0, got step=-1"),
      ("tail", lambda r, x: r.producer_tail(-3), {}, "counted from 0, got num_steps=-3"),
      ("float", lambda r, x: r.stage(1.5), {}, "expected a step of a ring"),
      ("true", lambda r, x: r.stage(True), {}, "expected a step of a ring"),
      ("none", lambda r, x: r.producer_acquire(None), {}, "expected a step of a ring"),
      ("vector", lambda r, x: r.stage(np.arange(2)), {}, "expected a step of a ring"),
      ("traced_float", lambda r, x: r.stage(r.stage(0)[...][0]), {},
       "expected a step of a ring"),
  )
  def test_bad(self, use, arguments, says):
    with self.assertRaisesRegex(jax_mgpu_ext.SpecError, says) as caught:
      self._trace(use, **arguments)
    self.assertEqual(caught.exception.code, "MGPU125")

  @parameterized.named_parameters(
      ("commit", lambda r, x: r.producer_commit(0), dict(transfers_per_stage=0)),
      ("copy", lambda r, x: r.copy_in(x, step=0), {}),
      ("numpy", lambda r, x: r.producer_acquire(np.uint8(4)), {}),
      ("tail", lambda r, x: r.producer_tail(np.uint32(1)), {}),
  )
  def test_good(self, use, arguments):
    self._trace(use, **arguments)


def _sum_kernel(num_steps, *, traced, where, interpret=None, stores=False, **ring_arguments):
  """Adds up the tiles of x; one producer, one consumer."""

  def use(x, o, found, total):
    wg = lax.axis_index("wg")

    def fill(step):
      found.producer_acquire(step)
      src = x.at[pl.ds(step * 8, 8)]
      if stores:
        found.stage(step)["t"][...] = src[...]
        found.producer_commit(step)
      else:
        found.copy_in(dict(t=src), step=step)

    def drain(step):
      tile = found.consumer_wait(step)["t"]
      total[...] = total[...] + tile[...]
      found.consumer_release(step)

    @pl.when(wg == 0)
    def _producer():
      if traced:
        pl.loop(0, num_steps)(fill)
      else:
        for step in range(num_steps):
          fill(step)
      found.producer_tail(num_steps)

    @pl.when(wg == 1)
    def _consumer():
      total[...] = jnp.zeros((8, 128), F32)
      if traced:
        pl.loop(0, num_steps)(drain)
      else:
        for step in range(num_steps):
          drain(step)
      plgpu.commit_smem()
      plgpu.copy_smem_to_gmem(total, o)
      plgpu.wait_smem_to_gmem(0)

  spec = specs.RingBuffer(
      dict(t=plgpu.SMEM((8, 128), F32)), consumer_reads="generic",
      transfers_per_stage=0 if stores else 1, **ring_arguments,
  )
  total = plgpu.SMEM((8, 128), F32)
  scratch: Any = ()
  if where == "names":
    body = lambda x, o, *, r, total: use(x, o, r, total)
    scratch = dict(r=spec, total=total)
  elif where == "struct":
    body = lambda x, o, s: use(x, o, s.ring, s.out)
    scratch = [Scratch(ring=spec, out=total)]
  else:
    def body(x, o):
      pl.run_scoped(
          lambda s: use(x, o, s.ring, s.out), Scratch(ring=spec, out=total),
          collective_axes="wg",
      )
  return plgpu.kernel(
      body, out_type=jax.ShapeDtypeStruct((8, 128), F32), scratch_types=scratch,
      num_threads=2, thread_name="wg", interpret=interpret,
  )


class KernelTest(parameterized.TestCase):

  @parameterized.product(
      num_stages=(1, 2, 3),
      more=(-1, 0, 1),
      traced=(False, True),
  )
  def test_steps(self, num_stages, more, traced):
    num_steps = num_stages + more
    self.check(num_steps, traced=traced, where="names", num_stages=num_stages)

  @parameterized.product(where=("struct", "run_scoped"), stores=(False, True))
  def test_places(self, where, stores):
    self.check(5, traced=True, where=where, stores=stores, num_stages=2)

  def check(self, num_steps, **arguments):
    kernel = _sum_kernel(
        num_steps,
        interpret=check_interpreter.parameters(detect_races=True),
        **arguments,
    )
    rows = 8 * max(num_steps, 1)
    x = np.arange(rows * 128, dtype=np.float32).reshape(-1, 8, 128) % 11
    with check_interpreter.Watch() as watch:
      out = np.asarray(kernel(x.reshape(rows, 128)))
      self.assertIsNone(watch.race())
    np.testing.assert_array_equal(out, x[:num_steps].sum(0))
    lowered = jax.jit(_sum_kernel(num_steps, **arguments)).trace(
        x.reshape(rows, 128)
    ).lower(lowering_platforms=("cuda",))
    self.assertIn("mosaic_gpu", lowered.as_text())


if __name__ == "__main__":
  absltest.main()
