"""Tests of the kernels that reduce rows over a cluster."""

from __future__ import annotations


from absl.testing import absltest
from absl.testing import parameterized
import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np

from jax._src.pallas.mosaic_gpu.interpret import shared_memory
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_mgpu_ext import aot
from jax_mgpu_ext import budget
from jax_mgpu_ext._src import check_interpreter
from jax_mgpu_ext.kernels import cluster_rms_norm
from jax_mgpu_ext.kernels import cluster_softmax
from jax_mgpu_ext.kernels.by_hand import cluster_rms_norm as rms_norm_by_hand
from jax_mgpu_ext.kernels.by_hand import cluster_softmax as softmax_by_hand
from tests import aot_support

_MODULES = dict(softmax=cluster_softmax, rms_norm=cluster_rms_norm)
_BY_HAND = dict(softmax=softmax_by_hand, rms_norm=rms_norm_by_hand)
_NAMES = tuple(_MODULES)
_TARGETS = ("h100", "b200")
# The smallest tiles that are legal, in both widths of a type.
_TILES = {jnp.float32: (64, 8), jnp.bfloat16: (64, 16)}
_RTOL = {jnp.float32: 2e-5, jnp.bfloat16: 1e-2}


def why_not_interpreted() -> str:
  """Returns why this release cannot interpret the kernels, empty if it can."""
  if hasattr(shared_memory, "ClusterBarrier"):
    return ""
  return (
      f"the interpreter of JAX {jax.__version__} has no cluster barriers, and"
      " cannot carry out plgpu.load"
  )


def run(module, inputs, **kwargs):
  """Runs a kernel in interpret mode; returns the output, and the race or None.

  An exception of the kernel comes out as the interpreter raised it.
  """
  kernel = module.make_kernel(
      interpret=check_interpreter.parameters(detect_races=True), **kwargs
  )
  with check_interpreter.Watch() as watch:
    try:
      output = np.asarray(jax.block_until_ready(kernel(*inputs)))
    except Exception as error:  # pylint: disable=broad-exception-caught
      cause = watch.cause(error)
      return None, watch.race(cause) or repr(cause)
    return output, watch.race()


def _inputs(name, kwargs):
  kwargs = {k: v for k, v in kwargs.items() if k != "num_stages"}
  return _MODULES[name].make_inputs(np.random.default_rng(0), **kwargs)


class InterpretTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    if reason := why_not_interpreted():
      self.skipTest(reason)

  def assert_right(self, name, modules=_MODULES, **kwargs):
    inputs = _inputs(name, kwargs)
    output, fault = run(modules[name], inputs, **kwargs)
    self.assertIsNone(fault)
    want = _MODULES[name].reference(*inputs)
    self.assertEqual(output.dtype, want.dtype)
    np.testing.assert_allclose(
        output.astype(np.float64),
        want.astype(np.float64),
        rtol=_RTOL[kwargs.get("dtype", jnp.float32)],
        atol=1e-30,
    )

  @parameterized.product(name=_NAMES, num_stages=(1, 2, 3, 4))
  def test_steps_around_the_stages(self, name, num_stages):
    for num_steps in sorted({
        1, max(1, num_stages - 1), num_stages, num_stages + 1,
        3 * num_stages + 2,
    }):
      with self.subTest(num_steps=num_steps):
        self.assert_right(
            name, num_steps=num_steps, num_stages=num_stages, tile=(64, 8)
        )

  @hypothesis.settings(derandomize=True, deadline=None, max_examples=12)
  @hypothesis.given(
      name=st.sampled_from(sorted(_MODULES)),
      num_blocks=st.sampled_from((1, 2, 4)),
      num_clusters=st.integers(1, 2),
      num_steps=st.integers(1, 5),
      num_stages=st.integers(1, 4),
      dtype=st.sampled_from(sorted(_TILES, key=str)),
  )
  def test_any_arguments(self, dtype, **kwargs):
    self.assert_right(dtype=dtype, tile=_TILES[dtype], **kwargs)

  @parameterized.product(name=_NAMES, num_blocks=(1, 2, 4))
  def test_by_hand(self, name, num_blocks):
    self.assert_right(
        name, _BY_HAND, num_blocks=num_blocks, num_steps=3, tile=(64, 8)
    )

  def test_all_blocks_scale_alike(self):
    x = np.ones((64, 32), np.float32)
    output, _ = run(
        cluster_softmax, (x,), num_blocks=4, num_steps=1, tile=(64, 8)
    )
    np.testing.assert_array_equal(output, x / 32)

  def test_part_of_minus_infinity(self):
    x = np.zeros((64, 32), np.float32)
    x[:, :16] = -np.inf
    x[1, 20] = 5
    output, _ = run(
        cluster_softmax, (x,), num_blocks=2, num_steps=1, tile=(64, 16)
    )
    np.testing.assert_allclose(output, cluster_softmax.reference(x), rtol=1e-6)


class ProtocolTest(parameterized.TestCase):
  """Each part of the exchange is needed: without it, the kernel fails.

  The twin of every test is `InterpretTest.test_by_hand`.
  """

  def setUp(self):
    super().setUp()
    if reason := why_not_interpreted():
      self.skipTest(reason)

  def fault_without(self, name, which):
    """Runs without one of the barriers of the exchange; returns the fault."""
    left_out = []

    def kernel_of(original):
      def kernel(body, **options):
        def marked(*refs):
          # In the twin, they are the last two refs of the body.
          left_out.append(refs[which])
          return body(*refs)

        return original(marked, **options)

      return kernel

    def unless_left_out(original):
      return lambda ref: None if ref is left_out[-1] else original(ref)

    kwargs = dict(num_blocks=4, num_steps=6, tile=(64, 8))
    inputs = _inputs(name, kwargs)
    with absltest.mock.patch.multiple(
        plgpu,
        kernel=kernel_of(plgpu.kernel),
        barrier_wait=unless_left_out(plgpu.barrier_wait),
        barrier_arrive=unless_left_out(plgpu.barrier_arrive),
    ):
      return run(_BY_HAND[name], inputs, **kwargs)[1]

  @parameterized.product(name=_NAMES, which=(-2, -1))
  def test_exchange(self, name, which):
    # A barrier has one clock: what arrives between its completion and the end
    # of a wait for it seems to have been awaited too. So a race may go unseen,
    # by chance.
    for _ in range(4):
      if fault := self.fault_without(name, which):
        break
    # Or a peer has not even begun, and has no SMEM yet.
    self.assertRegex(str(fault), "RACE DETECTED|KeyError")


@aot_support.needs_compiler
class CompileTest(aot_support.CompilingTestCase):

  @parameterized.product(
      name=_NAMES,
      target=_TARGETS,
      kwargs=(
          {},
          dict(num_blocks=4, num_stages=4, dtype=jnp.bfloat16),
          dict(num_blocks=1, tile=(64, 192), dtype=jnp.float16),
      ),
  )
  def test_same_code(self, name, target, kwargs):
    inputs = _inputs(name, kwargs)
    ours, twin = (
        aot.compile_kernel(
            modules[name].make_kernel(**kwargs), *inputs, target=target,
            sass=False,
        )
        for modules in (_MODULES, _BY_HAND)
    )
    aot.assert_same_code(ours.ptx, twin.ptx)
    self.assertEqual(ours.registers, twin.registers)
    self.assertEqual((ours.spill_bytes, twin.spill_bytes), (0, 0))
    self.assertEqual(ours.smem_bytes, twin.smem_bytes)
    for one in ours.resources:
      self.assertTrue(one.fits)
    # Two values of float32 a thread (its two rows) of each ref of each block.
    refs = dict(softmax=2, rms_norm=1)[name]
    blocks = kwargs.get("num_blocks", 2)
    self.assertEqual(
        ours.ptx.count("ld.shared::cluster"),
        2 * refs * blocks if blocks > 1 else 0,
    )


class ArgumentsTest(parameterized.TestCase):

  @parameterized.product(
      name=_NAMES,
      case=(
          (dict(num_blocks=3), "1, 2 or 4 blocks, got num_blocks=3"),
          (dict(num_blocks=True), "num_blocks=True"),
          (dict(num_steps=0), "num_steps=0"),
          (dict(num_clusters=0), "num_clusters=0"),
          (dict(num_stages=0), "num_stages=0"),
          (dict(num_stages=33), "num_stages=33"),
          (dict(tile=(32, 64)), "multiple of 64 rows"),
          (dict(tile=(64, 3)), "tile="),
          (dict(tile=(64, 4)), "multiple of 32 bytes"),
          (dict(dtype=jnp.int8), "dtype=int8"),
      ),
      by_hand=(False, True),
  )
  def test_bad(self, name, case, by_hand):
    kwargs, says = case
    with self.assertRaisesRegex(ValueError, says):
      (_BY_HAND if by_hand else _MODULES)[name].make_kernel(**kwargs)

  @parameterized.parameters(*_NAMES)
  def test_good(self, name):
    _MODULES[name].make_kernel(num_stages=32, num_blocks=1)
    _BY_HAND[name].make_kernel(num_stages=32, num_blocks=1)


if __name__ == "__main__":
  absltest.main()
