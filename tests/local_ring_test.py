"""The local ring, in both versions: values, races, and the same code."""

from __future__ import annotations

from absl.testing import absltest
from absl.testing import parameterized
import hypothesis
from hypothesis import strategies as st
import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np

from jax_mgpu_ext import aot
from jax_mgpu_ext._src import check_interpreter
from jax_mgpu_ext.kernels import local_ring
from jax_mgpu_ext.kernels.by_hand import local_ring as by_hand
from tests import aot_support
from tests import lowering

_TILE = (4, 64)
_RACES = check_interpreter.parameters(detect_races=True)
# What the interpreter says of a wait that is missing.
_SAYS = "RACE|observ|phase|completed"
_OF_INPUTS = ("num_blocks", "num_steps", "tile", "dtype")


def _inputs(arguments, seed=0):
  chosen = {k: v for k, v in arguments.items() if k in _OF_INPUTS}
  return local_ring.make_inputs(np.random.default_rng(seed), **chosen)


def _reference(arguments, inputs):
  chosen = {k: v for k, v in arguments.items() if k in ("num_steps", "tile")}
  return local_ring.reference(*inputs, **chosen)


def _step_counts(num_stages):
  return sorted(
      {0, 1, num_stages - 1, num_stages, num_stages + 1, 3 * num_stages + 2}
  )


class InterpretTestCase(parameterized.TestCase):

  def interpret(self, kernel, *inputs):
    """Runs a kernel, which must not race, and returns what comes out."""
    with check_interpreter.Watch() as watch:
      try:
        output = np.asarray(kernel(*inputs))
      except Exception as error:  # pylint: disable=broad-exception-caught
        # Before 0.12 the caller does not get to see what went wrong.
        raise watch.cause(error) from error
      self.assertIsNone(watch.race())
    return output

  def assert_right(self, module=local_ring, **arguments):
    arguments = {"tile": _TILE, **arguments}
    inputs = _inputs(arguments)
    output = self.interpret(
        module.make_kernel(interpret=_RACES, **arguments), *inputs
    )
    np.testing.assert_array_equal(output, _reference(arguments, inputs))


class ValuesTest(InterpretTestCase):

  @parameterized.product(num_stages=(1, 2, 3, 4), num_consumers=(1, 2))
  def test_step_counts(self, num_stages, num_consumers):
    for num_steps in _step_counts(num_stages):
      with self.subTest(num_steps=num_steps):
        self.assert_right(
            num_stages=num_stages,
            num_consumers=num_consumers,
            num_steps=num_steps,
        )

  @parameterized.product(num_stages=(1, 3), filled_by=("tma", "stores"))
  def test_static_steps(self, num_stages, filled_by):
    for num_steps in _step_counts(num_stages):
      with self.subTest(num_steps=num_steps):
        self.assert_right(
            num_stages=num_stages,
            num_consumers=2,
            num_steps=num_steps,
            unroll=True,
            filled_by=filled_by,
        )

  @hypothesis.settings(derandomize=True, deadline=None, max_examples=12)
  @hypothesis.given(
      num_stages=st.integers(1, 4),
      laps=st.sampled_from(((0, 0), (0, 1), (1, -1), (1, 0), (1, 1), (3, 2))),
      num_consumers=st.integers(1, 2),
      num_blocks=st.integers(1, 2),
      filled_by=st.sampled_from(("tma", "stores")),
      unroll=st.booleans(),
      dtype=st.sampled_from((jnp.float32, jnp.bfloat16)),
      module=st.sampled_from((local_ring, by_hand)),
  )
  def test_all_together(self, num_stages, laps, **arguments):
    per_lap, more = laps
    self.assert_right(
        num_stages=num_stages,
        num_steps=per_lap * num_stages + more,
        **arguments,
    )

  @parameterized.parameters(1, 2, 3)
  def test_traced_number_of_steps(self, num_stages):
    """Each block has as many steps as its entry of an array says."""
    kernel = _ragged_sum(num_stages, interpret=_RACES)
    x = np.random.default_rng(0).integers(-8, 9, (8, 4, 64)).astype(np.float32)
    for lengths in ((0, 1), (num_stages, num_stages + 1), (8, 2)):
      with self.subTest(lengths=lengths):
        output = self.interpret(kernel, np.array(lengths, np.int32), x)
        want = np.stack([x[:length].sum(0) for length in lengths])
        np.testing.assert_array_equal(output, want)

  @parameterized.parameters(local_ring, by_hand)
  def test_vmap(self, module):
    arguments = dict(num_steps=3, num_stages=2, tile=_TILE)
    inputs = [_inputs(arguments, seed) for seed in range(2)]
    kernel = module.make_kernel(interpret=_RACES, **arguments)
    output = self.interpret(jax.vmap(kernel), *map(np.stack, zip(*inputs)))
    np.testing.assert_array_equal(
        output, np.stack([_reference(arguments, each) for each in inputs])
    )

  def test_reference_depends_on_every_operand(self):
    a, b = _inputs({})
    want = local_ring.reference(a, b)
    self.assertEqual(want.shape, (1, 64, 64))
    self.assertEqual(want[0, 5, 7], sum(
        a[0, 64 * step + 5, 7] * b[0, 64 * step + 5, 7] for step in range(8)
    ))


def _ragged_sum(num_stages, *, interpret):

  def body(lengths, x, y, ring, y_smem):
    block = lax.axis_index("block")
    warpgroup = lax.axis_index("warpgroup")
    num_steps = lengths[block]

    @pl.when(warpgroup == 0)
    def _producer():

      @pl.loop(0, num_steps)
      def _fill(step):
        ring.producer_acquire(step)
        ring.copy_in(x.at[step], step=step)

      ring.producer_tail(num_steps)

    @pl.when(warpgroup == 1)
    def _consumer():
      y_smem[...] = jnp.zeros(y_smem.shape, y_smem.dtype)

      @pl.loop(0, num_steps)
      def _add(step):
        y_smem[...] += ring.consumer_wait(step)[...]
        ring.consumer_release(step)

      plgpu.commit_smem()
      plgpu.copy_smem_to_gmem(y_smem, y.at[block])
      plgpu.wait_smem_to_gmem(0)

  tile = plgpu.SMEM(_TILE, jnp.float32)
  return plgpu.kernel(
      body,
      out_type=jax.ShapeDtypeStruct((2, *_TILE), jnp.float32),
      scratch_types=[
          local_ring.RingBuffer(tile, num_stages, consumer_reads="generic"),
          tile,
      ],
      grid=(2,),
      grid_names=("block",),
      num_threads=2,
      thread_name="warpgroup",
      interpret=interpret,
  )


class ProtocolTest(InterpretTestCase):
  """Without each part the kernel fails; `ValuesTest` is the twin."""

  def setUp(self):
    super().setUp()
    if lowering.version() < (0, 11, 0):
      self.skipTest(
          f"in the interpreter of JAX {jax.__version__} a thread that fails"
          " leaves the others waiting for ever"
      )

  def assert_fails(self, says, **arguments):
    try:
      self.assert_right(**arguments)
    except Exception as error:  # pylint: disable=broad-exception-caught
      self.assertRegex(str(error), says)
    else:
      self.fail("nothing failed")

  def without(self, name):
    self.enter_context(
        absltest.mock.patch.object(
            local_ring.RingBuffer, name, lambda *args, **kwargs: None
        )
    )

  def test_acquire(self):
    self.without("producer_acquire")
    self.assert_fails(_SAYS, num_stages=2, num_steps=5)

  def test_tail(self):
    if lowering.version() >= (0, 12, 0):
      self.skipTest(
          f"the interpreter of JAX {jax.__version__} does not mind completions"
          " that nobody waits for"
      )
    self.without("producer_tail")
    self.assert_fails(_SAYS, num_stages=2, num_steps=5)

  @parameterized.parameters("tma", "stores")
  def test_wait_of_the_consumer(self, filled_by):
    self.enter_context(
        absltest.mock.patch.object(
            local_ring.RingBuffer,
            "consumer_wait",
            local_ring.RingBuffer.stage,
        )
    )
    self.assert_fails(_SAYS, filled_by=filled_by, num_steps=2)


class ArgumentsTest(parameterized.TestCase):

  @parameterized.product(
      module=(local_ring, by_hand),
      case=(
          (dict(num_steps=-1), "num_steps=-1"),
          (dict(num_steps=True), "num_steps=True"),
          (dict(num_stages=0), "num_stages=0"),
          (dict(num_blocks=0), "num_blocks=0"),
          (dict(num_consumers=3), "one or two consumers"),
          (dict(num_consumers=2, tile=(33, 128)), "share evenly"),
          (dict(filled_by="magic"), "tma or stores"),
          (dict(tile=(64, 3)), "tile="),
          (dict(dtype=jnp.int8), "dtype=int8"),
      ),
  )
  def test_bad(self, module, case):
    arguments, says = case
    with self.assertRaisesRegex(ValueError, says):
      module.make_kernel(**arguments)

  def test_too_many_stages(self):
    with self.assertRaisesRegex(ValueError, "num_stages=33.*MGPU121"):
      local_ring.make_kernel(num_stages=33, tile=_TILE)
    local_ring.make_kernel(num_stages=32, tile=_TILE)


@aot_support.needs_compiler
class CodeTest(aot_support.CompilingTestCase):

  @parameterized.product(
      arguments=(
          {},
          dict(num_consumers=2, num_stages=2, tile=(32, 64)),
          dict(filled_by="stores", num_consumers=2, num_stages=4),
          dict(unroll=True, num_steps=5),
          dict(num_steps=0, num_stages=1),
      ),
      target=("h100", "b200"),
  )
  def test_same_code(self, arguments, target):
    inputs = _inputs(arguments)
    spec, hand = (
        aot.compile_kernel(
            module.make_kernel(**arguments), *inputs, target=target, sass=False
        )
        for module in (local_ring, by_hand)
    )
    aot.assert_same_code(spec, hand)
    for code in (spec, hand):
      self.assertEqual(code.registers, spec.registers)
      self.assertEqual(code.spill_bytes, 0)
      [resources] = code.resources
      self.assertEqual(resources.smem_bytes, code.smem_bytes)
      self.assertEqual(resources.over, ())
    self.assertEqual(spec.smem_bytes, hand.smem_bytes)

  def test_vmap_is_the_same_code(self):
    arguments = dict(num_steps=3, num_stages=2)
    inputs = [np.stack([each, each]) for each in _inputs(arguments)]
    spec, hand = (
        aot.compile_kernel(
            jax.vmap(module.make_kernel(**arguments)), *inputs, sass=False
        )
        for module in (local_ring, by_hand)
    )
    aot.assert_same_code(spec, hand)

  def test_stores_need_no_fence(self):
    counts = {}
    for filled_by in ("tma", "stores"):
      kernel = local_ring.make_kernel(filled_by=filled_by, num_steps=5)
      code = aot.compile_kernel(kernel, *_inputs(dict(num_steps=5)), sass=False)
      counts[filled_by] = code.ptx.count("fence.proxy.async")
    # The one before the store of the result.
    self.assertEqual(counts["stores"], 1)
    self.assertGreater(counts["tma"], 1)


if __name__ == "__main__":
  absltest.main()
