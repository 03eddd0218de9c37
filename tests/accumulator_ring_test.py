"""The ring of accumulators: its parts, what it refuses, and its protocol."""

from __future__ import annotations

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
from jax_mgpu_ext._src import check_interpreter
from jax_mgpu_ext._src.specs import accumulator_ring
from jax_mgpu_ext._src.specs import ring_buffer
from tests import lowering

AccumulatorRing = accumulator_ring.AccumulatorRing
_F32 = jnp.float32


def _acc(columns=64, **arguments):
  return plgpu.TMEM((128, columns), _F32, **arguments)


def _pair():
  return AccumulatorRing(_acc(collective=True), collective_axis="x")


class PartsTest(parameterized.TestCase):

  def test_one_block(self):
    ring = AccumulatorRing(_acc())
    self.assertEqual(ring.num_stages, 2)
    self.assertEqual(ring.acc, _acc())
    self.assertEqual(ring.stages, plgpu.TMEM((128, 128), _F32))
    barrier = plgpu.Barrier(
        num_arrivals=1, num_barriers=2, orders_tensor_core=True
    )
    self.assertEqual((ring.full, ring.empty), (barrier, barrier))
    self.assertEqual(repr(ring), "AccumulatorRing(128x64, num_stages=2)")

  def test_two_blocks(self):
    ring = _pair()
    self.assertTrue(ring.stages.collective)
    self.assertIsInstance(ring.full, plgpu.Barrier)
    self.assertEqual(
        ring.empty,
        plgpu.ClusterBarrier(
            collective_axes=("x",), num_arrivals=1, num_barriers=2,
            orders_tensor_core=True,
        ),
    )
    self.assertIn("collective_axis='x'", repr(ring))

  def test_consumers(self):
    ring = AccumulatorRing(_acc(), 3, num_consumers=2)
    self.assertEqual((ring.full.num_arrivals, ring.empty.num_arrivals), (1, 2))
    self.assertEqual(
        repr(ring), "AccumulatorRing(128x64, num_stages=3, num_consumers=2)"
    )

  def test_is_a_composite(self):
    ring = AccumulatorRing(_acc())
    leaves, structure = jax.tree.flatten(ring)
    self.assertEqual(leaves, [ring.stages, ring.full, ring.empty])
    self.assertEqual(jax.tree.unflatten(structure, leaves), ring)
    self.assertIsInstance(avals.ref_aval(ring), AccumulatorRing)
    with self.assertRaisesRegex(ValueError, "not arrays.*MGPU120"):
      avals.array_aval(ring)

  @parameterized.parameters(
      (512, 1, 512), (256, 2, 512), (8, 32, 256), (48, 10, 512), (64, 2, 128)
  )
  def test_budget(self, columns, num_stages, allocated):
    ring = AccumulatorRing(_acc(columns), num_stages)
    found = budget.budget(ring, "b200")
    self.assertEqual(found.over, ())
    self.assertEqual(found.tmem_columns, allocated)


class ErrorsTest(parameterized.TestCase):

  @parameterized.named_parameters(
      ("no_stages", lambda: AccumulatorRing(_acc(), 0), "MGPU121",
       "num_stages must be at least 1"),
      ("fraction", lambda: AccumulatorRing(_acc(), 1.5), "MGPU121",
       "num_stages must be an integer"),
      ("no_consumers", lambda: AccumulatorRing(_acc(), num_consumers=0),
       "MGPU121", "num_consumers must be at least 1"),
      ("too_many", lambda: AccumulatorRing(_acc(256), 3), "MGPU121",
       r"num_stages=3 accumulators of 256 columns take 768 columns of TMEM,"
       r" which has 512.*at acc.*num_stages=2"),
      ("phases", lambda: AccumulatorRing(_acc(8), 33), "MGPU121",
       "num_stages must be at most 32"),
      ("too_wide", lambda: AccumulatorRing(_acc(520), 1), "MGPU121",
       "an accumulator of 512 columns at most"),
      ("smem", lambda: AccumulatorRing(plgpu.SMEM((128, 64), _F32)), "MGPU123",
       r"a memory ref in TMEM .*at acc"),
      ("barrier", lambda: AccumulatorRing(plgpu.Barrier()), "MGPU123",
       r"a memory ref in TMEM .*at acc"),
      ("array", lambda: AccumulatorRing(
          jax.ShapeDtypeStruct((128, 64), _F32)), "MGPU123",
       r"a memory ref in TMEM .*at acc"),
      ("half", lambda: AccumulatorRing(
          plgpu.TMEM((128, 64), jnp.float16, packed=True)), "MGPU123",
       r"128 rows of float32.*at acc"),
      ("integers", lambda: AccumulatorRing(
          plgpu.TMEM((128, 64), jnp.int32)), "MGPU123", "128 rows of float32"),
      ("rows", lambda: AccumulatorRing(plgpu.TMEM((64, 64), _F32)), "MGPU123",
       "128 rows of float32"),
      ("axis_alone", lambda: AccumulatorRing(_acc(), collective_axis="x"),
       "MGPU121", "collective_axis='x' and collective=False.*at acc"),
      ("collective_alone", lambda: AccumulatorRing(_acc(collective=True)),
       "MGPU121", "collective_axis=None and collective=True.*at acc"),
  )
  def test_bad(self, make, code, says):
    with self.assertRaisesRegex(jax_mgpu_ext.SpecError, says) as caught:
      make()
    self.assertEqual(caught.exception.code, code)

  def test_types(self):
    with self.assertRaises(TypeError):
      AccumulatorRing(plgpu.SMEM((128, 64), _F32))

  def test_mesh(self):
    ring = AccumulatorRing(_acc(), num_consumers=2)
    lowering.lower([ring], num_threads=2, thread_name="wg")
    with self.assertRaisesRegex(
        jax_mgpu_ext.SpecError, "num_threads=3 and a thread_name.*MGPU124"
    ):
      lowering.lower([ring])


class RingForTensorCoreTest(parameterized.TestCase):
  """`RingBuffer(consumer_reads="tcgen05")`."""

  def _ring(self, **arguments):
    tile = plgpu.SMEM((8, 128), jnp.float16)
    arguments = {"consumer_reads": "tcgen05", **arguments}
    return ring_buffer.RingBuffer(dict(a=tile, b=tile), 3, **arguments)

  def test_one_block(self):
    ring = self._ring()
    self.assertEqual(ring.full, plgpu.Barrier(num_arrivals=2, num_barriers=3))
    self.assertEqual(
        ring.empty,
        plgpu.Barrier(num_arrivals=1, num_barriers=3, orders_tensor_core=True),
    )

  def test_two_blocks(self):
    part = plgpu.CopyPartition
    ring = self._ring(
        collective_axes="x",
        leader_tracked=dict(a=part.PARTITIONED(0), b=part.REPLICATED),
    )
    # No cluster barrier: the tensor core arrives in both blocks.
    self.assertEqual(ring.empty, self._ring().empty)
    self.assertIn("leader_tracked=", repr(ring))
    self.assertEqual(
        jax.tree.structure(ring), jax.tree.structure(self._ring(
            collective_axes=dict(a="x", b=("x",)),
            leader_tracked=dict(a=part.PARTITIONED(0), b=part.REPLICATED),
        ))
    )

  def test_others_are_as_before(self):
    for reads in ("async", "generic"):
      ring = self._ring(consumer_reads=reads)
      self.assertFalse(ring.empty.orders_tensor_core)
      self.assertNotIn("leader_tracked", repr(ring))

  @parameterized.named_parameters(
      ("multicast", dict(collective_axes="x"),
       "one axis of the collective MMA"),
      ("half", dict(
          collective_axes=dict(a="x", b=None),
          leader_tracked=dict(a=plgpu.CopyPartition.PARTITIONED(0), b=None),
      ), "one axis of the collective MMA"),
      ("two_axes", dict(
          collective_axes=("x", "y"),
          leader_tracked=plgpu.CopyPartition.REPLICATED,
      ), "one axis of the collective MMA"),
      ("no_axis", dict(leader_tracked=plgpu.CopyPartition.REPLICATED),
       "one axis of the collective MMA"),
      ("no_partition", dict(
          collective_axes="x", leader_tracked=dict(a=0, b=0)),
       "one axis of the collective MMA"),
      ("not_tcgen05", dict(
          consumer_reads="async", collective_axes="x",
          leader_tracked=plgpu.CopyPartition.REPLICATED,
      ), "leader_tracked needs consumer_reads='tcgen05'"),
      ("keys", dict(
          collective_axes="x",
          leader_tracked=dict(c=plgpu.CopyPartition.REPLICATED),
      ), "leader_tracked for each ref must be a tree like data"),
  )
  def test_bad(self, arguments, says):
    with self.assertRaisesRegex(jax_mgpu_ext.SpecError, says) as caught:
      self._ring(**arguments)
    self.assertEqual(caught.exception.code, "MGPU121")


def _squares(num_steps, num_stages, num_consumers, *, unroll, interpret):
  """A kernel whose MMA warp computes a * b[s] for each step s."""

  def run(body):
    if not unroll:
      return pl.loop(0, num_steps)(body)
    for step in range(num_steps):
      body(step)

  def body(a, b, y, a_smem, b_smem, y_smem, loaded, ring):
    thread = lax.axis_index("thread")
    share = 16 // num_consumers

    @pl.when(thread == 0)
    def _multiply():
      plgpu.copy_gmem_to_smem(a, a_smem, loaded)
      plgpu.copy_gmem_to_smem(b, b_smem, loaded)
      plgpu.barrier_wait(loaded)

      @plgpu.warp_map
      def _of_warp(warp):

        @pl.when(warp == 0)
        def _():

          def multiply(step):
            ring.producer_acquire(step)
            plgpu.tcgen05_mma(
                ring.stage(step), a_smem, b_smem.at[step], accumulate=False
            )
            ring.producer_commit(step)

          run(multiply)
          ring.producer_tail(num_steps)

    @pl.when(thread > 0)
    def _store():
      cols = pl.ds((thread - 1) * share, share)

      def store(step):
        acc = ring.consumer_wait(step)
        y_smem[:, cols] = plgpu.async_load_tmem(acc.at[:, cols])
        ring.consumer_release(step)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(y_smem.at[:, cols], y.at[step, :, cols])
        plgpu.wait_smem_to_gmem(0)

      run(store)

  tile = lambda *shape: plgpu.SMEM(shape, jnp.float16, transforms=(
      plgpu.TilingTransform((8, 16)), plgpu.SwizzleTransform(32)))
  steps = max(num_steps, 1)
  return plgpu.kernel(
      body,
      out_type=jax.ShapeDtypeStruct((steps, 128, 16), _F32),
      scratch_types=[
          tile(128, 16), tile(steps, 16, 16), plgpu.SMEM((128, 16), _F32),
          plgpu.Barrier(num_arrivals=2),
          AccumulatorRing(_acc(16), num_stages, num_consumers=num_consumers),
      ],
      num_threads=1 + num_consumers,
      thread_name="thread",
      interpret=interpret,
  )


class InterpretTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    if lowering.version() < (0, 11, 0):
      self.skipTest(
          f"the interpreter of JAX {jax.__version__} has no tensor memory"
      )

  def _run(self, num_steps, num_stages, num_consumers=1, unroll=False):
    rng = np.random.default_rng(0)
    a = rng.integers(-2, 3, (128, 16)).astype(np.float16)
    b = rng.integers(-2, 3, (num_steps, 16, 16)).astype(np.float16)
    kernel = _squares(
        num_steps, num_stages, num_consumers, unroll=unroll,
        interpret=check_interpreter.parameters(detect_races=True),
    )
    with check_interpreter.Watch() as watch:
      try:
        output = np.asarray(kernel(a, b))
      except Exception as error:  # pylint: disable=broad-exception-caught
        raise watch.cause(error) from error
      self.assertIsNone(watch.race())
    np.testing.assert_array_equal(output, a.astype(_F32) @ b.astype(_F32))

  @parameterized.product(num_stages=(1, 2, 3), unroll=(False, True))
  def test_step_counts(self, num_stages, unroll):
    counts = {1, num_stages, num_stages + 1, 3 * num_stages + 2}
    for num_steps in sorted(counts):
      with self.subTest(num_steps=num_steps):
        self._run(num_steps, num_stages, unroll=unroll)

  def test_two_consumers(self):
    self._run(5, 2, num_consumers=2)

  @parameterized.parameters("producer_acquire", "consumer_wait")
  def test_waits_are_needed(self, name):
    """The twin is `test_step_counts`."""
    without = AccumulatorRing.stage if name == "consumer_wait" else (
        lambda ring, step: None
    )
    self.enter_context(
        absltest.mock.patch.object(AccumulatorRing, name, without)
    )
    with self.assertRaisesRegex(
        Exception, "RACE|observ|phase|completed|not None"
    ):
      self._run(5, 2)


if __name__ == "__main__":
  absltest.main()
