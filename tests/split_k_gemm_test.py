"""Tests of the GEMM whose blocks share K."""

from __future__ import annotations

from absl.testing import absltest
from absl.testing import parameterized
import hypothesis
from hypothesis import strategies as st
import jax.numpy as jnp
import numpy as np

from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_mgpu_ext import aot
from jax_mgpu_ext.kernels import split_k_gemm
from jax_mgpu_ext.kernels.by_hand import split_k_gemm as by_hand
from tests import aot_support
from tests import cluster_reductions_test

_VERSIONS = dict(specs=split_k_gemm, by_hand=by_hand)


def _tiny(num_blocks, num_steps, **kwargs):
  """Returns the arguments of a kernel of so many steps a block."""
  tile = (64, 16 * num_blocks, 16)
  sizes = dict(m=64, n=tile[1], k=num_blocks * num_steps * 16)
  return dict(num_blocks=num_blocks, tile=tile, **sizes) | kwargs


def _inputs(kwargs):
  kwargs = {
      k: v for k, v in kwargs.items() if k in ("m", "n", "k", "dtype")
  }
  return split_k_gemm.make_inputs(np.random.default_rng(0), **kwargs)


class InterpretTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    if reason := cluster_reductions_test.why_not_interpreted():
      self.skipTest(reason)

  def assert_right(self, module=split_k_gemm, **kwargs):
    inputs = _inputs(kwargs)
    output, fault = cluster_reductions_test.run(module, inputs, **kwargs)
    self.assertIsNone(fault)
    want = split_k_gemm.reference(*inputs)
    self.assertEqual(output.dtype, want.dtype)
    np.testing.assert_array_equal(
        output.astype(np.float32), want.astype(np.float32)
    )

  @parameterized.parameters(1, 2, 3, 4)
  def test_steps_around_the_stages(self, num_stages):
    for num_steps in sorted({
        1, max(1, num_stages - 1), num_stages, num_stages + 1,
        3 * num_stages + 2,
    }):
      with self.subTest(num_steps=num_steps):
        self.assert_right(**_tiny(2, num_steps, num_stages=num_stages))

  @hypothesis.settings(derandomize=True, deadline=None, max_examples=10)
  @hypothesis.given(
      num_blocks=st.sampled_from((1, 2, 4)),
      num_steps=st.integers(1, 5),
      num_stages=st.integers(1, 4),
      tiles=st.sampled_from(((1, 1), (2, 1), (1, 2))),
      dtype=st.sampled_from((jnp.float16, jnp.bfloat16)),
  )
  def test_any_arguments(self, num_blocks, num_steps, tiles, **options):
    kwargs = _tiny(num_blocks, num_steps, **options)
    kwargs["m"] *= tiles[0]
    kwargs["n"] *= tiles[1]
    self.assert_right(**kwargs)

  @parameterized.parameters(1, 2, 4)
  def test_by_hand(self, num_blocks):
    self.assert_right(by_hand, **_tiny(num_blocks, 3, num_stages=2))

  @parameterized.parameters("posted", "read")
  def test_without_a_barrier_of_the_exchange(self, left_out):
    """The twin is `test_by_hand`: with it, there is no fault."""
    refs = []
    original = plgpu.kernel

    def kernel(body, **options):
      def marked(*args):
        refs.append(dict(posted=args[-2], read=args[-1])[left_out])
        return body(*args)

      return original(marked, **options)

    unless = lambda f: lambda ref: None if ref is refs[-1] else f(ref)
    kwargs = _tiny(4, 2, num_stages=2)
    # Without `read`, a block may leave early, or just in time.
    with absltest.mock.patch.multiple(
        plgpu,
        kernel=kernel,
        barrier_wait=unless(plgpu.barrier_wait),
        barrier_arrive=unless(plgpu.barrier_arrive),
    ):
      faults = [
          cluster_reductions_test.run(by_hand, _inputs(kwargs), **kwargs)[1]
          for _ in range(1 if left_out == "posted" else 3)
      ]
    if left_out == "posted":
      self.assertIsNotNone(faults[0])
    elif not any(faults):
      self.skipTest("no block left before its peers had read its SMEM")


@aot_support.needs_compiler
class CompileTest(aot_support.CompilingTestCase):

  @parameterized.parameters(
      {},
      dict(num_blocks=4, num_stages=3, dtype=jnp.bfloat16),
      dict(num_blocks=1, num_stages=3),
      _tiny(4, 4, num_stages=1),
  )
  def test_same_code(self, **kwargs):
    inputs = _inputs(kwargs)
    ours, twin = (
        aot.compile_kernel(
            module.make_kernel(**kwargs), *inputs, target="h100", sass=False
        )
        for module in (split_k_gemm, by_hand)
    )
    aot.assert_same_code(ours.ptx, twin.ptx)
    self.assertEqual(ours.registers, twin.registers)
    self.assertEqual((ours.spill_bytes, twin.spill_bytes), (0, 0))
    self.assertEqual(ours.smem_bytes, twin.smem_bytes)
    for one in ours.resources:
      self.assertTrue(one.fits)
    aot.assert_contains(ours.ptx, "wgmma")
    self.assertEqual(
        "ld.shared::cluster" in ours.ptx, kwargs.get("num_blocks") != 1
    )


class ArgumentsTest(parameterized.TestCase):

  @parameterized.product(
      case=(
          (dict(num_blocks=3), "1, 2 or 4 blocks, got num_blocks=3"),
          (dict(num_blocks=True), "num_blocks=True"),
          (dict(m=0), "m=0"),
          (dict(num_stages=0), "num_stages=0"),
          (dict(num_stages=33), "num_stages=33"),
          (dict(dtype=jnp.float32), "dtype=float32"),
          (dict(tile=(128, 128)), r"\(tile_m, tile_n, tile_k\)"),
          (dict(tile=64), r"\(tile_m, tile_n, tile_k\)"),
          (dict(tile=(32, 128, 64)), "tile_m in multiples of 64"),
          (dict(tile=(64, 16, 64)), "tile_n in multiples of 32"),
          (dict(tile=(64, 512, 64)), "at most 256"),
          (dict(tile=(64, 128, 8)), "tile_k in multiples of 16"),
          (dict(m=96), "m in multiples of 128, got m=96"),
          (dict(n=96), "n in multiples of 128, got n=96"),
          (dict(k=192), "k in multiples of 128, got k=192"),
      ),
      version=("specs", "by_hand"),
  )
  def test_bad(self, case, version):
    kwargs, says = case
    with self.assertRaisesRegex(ValueError, says):
      _VERSIONS[version].make_kernel(**kwargs)

  @parameterized.parameters("specs", "by_hand")
  def test_good(self, version):
    _VERSIONS[version].make_kernel()
    _VERSIONS[version].make_kernel(**_tiny(4, 1, num_stages=32))


if __name__ == "__main__":
  absltest.main()
