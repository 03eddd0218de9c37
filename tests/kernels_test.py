"""Tests of the reference kernels, and of what their protocols rest on."""

from __future__ import annotations

import collections
import contextlib
import pkgutil
import re

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from jax._src.pallas.mosaic_gpu import core as mosaic_gpu_core
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax._src.pallas.mosaic_gpu.interpret import params as interpret_params
from jax._src.pallas.mosaic_gpu.interpret import shared_memory
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_mgpu_ext import avals
from jax_mgpu_ext import check
from jax_mgpu_ext import kernels
from jax_mgpu_ext.kernels import cluster_ring
from jax_mgpu_ext.kernels import multicast_load
from jax_mgpu_ext.kernels import peer_exchange
from jax_mgpu_ext.kernels import tiles
from tests import aot_support
from tests import child

_MODULES = dict(
    peer_exchange=peer_exchange,
    multicast_load=multicast_load,
    cluster_ring=cluster_ring,
)
# JAX 0.10.2 has none in its interpreter.
_HAS_CLUSTER_BARRIERS = hasattr(shared_memory, "ClusterBarrier")
# Only with two clocks does it know that `commit_smem` must stand between ordinary
# accesses of SMEM and TMA's.
_KNOWS_COMMIT_SMEM = hasattr(shared_memory, "GpuClockBundle")

_ARGUMENTS = (
    ("peer_exchange", {}),
    ("peer_exchange", dict(num_steps=1)),
    ("peer_exchange", dict(num_steps=2, tile=(8, 256), dtype=jnp.float16)),
    ("multicast_load", {}),
    ("multicast_load", dict(num_steps=1)),
    ("multicast_load", dict(num_steps=3, tile=(16, 8), dtype=jnp.bfloat16)),
    ("cluster_ring", {}),
    ("cluster_ring", dict(num_stages=1)),
    ("cluster_ring", dict(num_steps=1)),
    ("cluster_ring", dict(num_steps=2, num_stages=5)),
    ("cluster_ring", dict(num_steps=6, num_stages=2, num_clusters=3)),
    ("cluster_ring", dict(num_steps=4, num_stages=4, dtype=jnp.bfloat16)),
)


def _named(arguments):
  for name, kwargs in arguments:
    values = "_".join(f"{k}_{v}" for k, v in kwargs.items())
    suffix = re.sub(r"\W+", "_", values.replace("jax.numpy.", ""))
    yield f"{name}_{suffix}", name, kwargs


def _inputs(name, kwargs):
  module = _MODULES[name]
  kwargs = {k: v for k, v in kwargs.items() if k != "num_stages"}
  return module.make_inputs(np.random.default_rng(0), **kwargs)


def _reference(name, kwargs, inputs):
  tile = {} if name == "peer_exchange" else {
      k: v for k, v in kwargs.items() if k == "tile"
  }
  return _MODULES[name].reference(*inputs, **tile)


def _interpret(name, kwargs):
  """Runs a kernel in interpret mode; returns the output, and whether it raced."""
  gpu_callbacks.reset_gpu_interpret_mode_state()
  kernel = _MODULES[name].make_kernel(
      interpret=interpret_params.InterpretGPUParams(detect_races=True), **kwargs
  )
  output = np.asarray(kernel(*_inputs(name, kwargs)))
  return output, gpu_callbacks.get_races().races_found


def _is_cluster_barrier(ref) -> bool:
  aval = getattr(ref, "ref", ref).aval
  return isinstance(
      aval.inner_aval.dtype, mosaic_gpu_core.ClusterBarrierType
  )


class KernelsTest(parameterized.TestCase):

  @parameterized.named_parameters(*_named(_ARGUMENTS))
  def test_lowers_for_cuda(self, name, kwargs):
    kernel = _MODULES[name].make_kernel(**kwargs)
    lowered = jax.jit(kernel).trace(*_inputs(name, kwargs)).lower(
        lowering_platforms=("cuda",)
    )
    self.assertIn("mosaic_gpu", lowered.as_text())

  @parameterized.named_parameters(*_named(_ARGUMENTS))
  def test_interpret(self, name, kwargs):
    if not _HAS_CLUSTER_BARRIERS:
      with self.assertRaisesRegex(NotImplementedError, "cluster_barrier"):
        _interpret(name, kwargs)
      return
    output, raced = _interpret(name, kwargs)
    want = _reference(name, kwargs, _inputs(name, kwargs))
    self.assertEqual(output.dtype, want.dtype)
    np.testing.assert_array_equal(output, want)
    self.assertFalse(raced)

  @parameterized.named_parameters(*_named(_ARGUMENTS))
  def test_every_spec_has_an_aval(self, name, kwargs):
    kwargs = {
        k: v
        for k, v in kwargs.items()
        if k in ("tile", "dtype")
        or (name == "cluster_ring" and k == "num_stages")
    }
    specs = _MODULES[name].specs(**kwargs)
    found = avals.ref_avals(specs)
    self.assertEqual(found.keys(), specs.keys())

  @parameterized.named_parameters(*((name, name) for name in _MODULES))
  def test_bad_arguments(self, name):
    make_kernel = _MODULES[name].make_kernel
    with self.assertRaisesRegex(ValueError, "num_steps=0"):
      make_kernel(num_steps=0)
    with self.assertRaisesRegex(ValueError, "tile="):
      make_kernel(tile=(64, 3))
    with self.assertRaisesRegex(ValueError, "dtype=int8"):
      make_kernel(dtype=jnp.int8)

  def test_bad_number_of_stages(self):
    for num_stages in (0, 33, True, 2.0):
      with self.assertRaisesRegex(ValueError, f"num_stages={num_stages}"):
        cluster_ring.make_kernel(num_stages=num_stages)
    cluster_ring.make_kernel(num_stages=32)

  def test_reference_of_the_ring_depends_on_every_operand(self):
    a, b = _inputs("cluster_ring", {})
    want = cluster_ring.reference(a, b)
    self.assertEqual(want.shape, (1, 2, 64, 64))
    self.assertEqual(want[0, 1, 5, 7], sum(
        a[0, 64 * step + 5, 7] * b[0, 1, 64 * step + 5, 7] for step in range(8)
    ))


class ProtocolTest(parameterized.TestCase):
  """Each part of a protocol is needed: without it, the kernel fails.

  The twin of every test is `KernelsTest.test_interpret`, with all parts there.
  """

  def setUp(self):
    super().setUp()
    if not _HAS_CLUSTER_BARRIERS:
      self.skipTest(
          f"the interpreter of JAX {jax.__version__} has no cluster barriers"
      )

  def assert_fails(self, name, says, **kwargs):
    """The kernel races, or the interpreter objects to its use of barriers."""
    try:
      _, raced = _interpret(name, kwargs)
    except Exception as error:  # pylint: disable=broad-exception-caught
      # Since 0.12 a race is an exception, too.
      self.assertRegex(str(error), f"RACE DETECTED|{says}")
    else:
      self.assertTrue(raced)

  @contextlib.contextmanager
  def without_waits(self, *, on_cluster_barriers: bool):
    wait = plgpu.barrier_wait

    def some_waits(ref):
      if _is_cluster_barrier(ref) != on_cluster_barriers:
        wait(ref)

    with absltest.mock.patch.object(plgpu, "barrier_wait", some_waits):
      yield

  @parameterized.parameters(*_MODULES)
  def test_wait_for_tma(self, name):
    with self.without_waits(on_cluster_barriers=False):
      self.assert_fails(name, "observ|phase|completed")

  @parameterized.parameters("peer_exchange", "cluster_ring")
  def test_wait_for_the_cluster(self, name):
    with self.without_waits(on_cluster_barriers=True):
      self.assert_fails(name, "observ|phase|completed")

  @parameterized.parameters(*_MODULES)
  def test_commit_smem(self, name):
    if not _KNOWS_COMMIT_SMEM:
      self.skipTest(
          f"the interpreter of JAX {jax.__version__} does not tell ordinary"
          " accesses of SMEM from TMA's"
      )
    with absltest.mock.patch.object(plgpu, "commit_smem", lambda: None):
      self.assert_fails(name, "nothing else")

  def test_wait_for_the_peers_mailbox_to_be_written(self):
    with absltest.mock.patch.object(
        plgpu, "wait_smem_to_gmem", lambda n: None
    ):
      self.assert_fails("peer_exchange", "read-side operations")

  @parameterized.parameters(*_MODULES)
  def test_patching_alone_changes_nothing(self, name):
    commit_smem = plgpu.commit_smem
    with absltest.mock.patch.object(
        plgpu, "commit_smem", lambda: commit_smem()
    ):
      output, raced = _interpret(name, {})
    np.testing.assert_array_equal(
        output, _reference(name, {}, _inputs(name, {}))
    )
    self.assertFalse(raced)


class TilesTest(parameterized.TestCase):

  @parameterized.parameters(
      ((64, 64), jnp.float32, 1),
      ((8, 16), jnp.float32, 2),
      ((16, 8), jnp.bfloat16, 2),
      ([256, np.int64(256)], jnp.float16, 2),
      ((1, 128), jnp.float32, 1),
  )
  def test_good(self, tile, dtype, num_blocks):
    found = tiles.check_tile(tile, dtype, num_blocks=num_blocks)
    self.assertEqual(found, tuple(tile))
    self.assertEqual([type(dim) for dim in found], [int, int])

  @parameterized.parameters(
      ((64, 64), jnp.int32, 1, "float32, bfloat16 or float16"),
      (64, jnp.float32, 1, r"\(rows, cols\), got tile=64"),
      ((64,), jnp.float32, 1, r"\(rows, cols\)"),
      ((64, "x"), jnp.float32, 1, r"\(rows, cols\)"),
      ((0, 64), jnp.float32, 1, "1 to 256"),
      ((64, 257), jnp.float32, 1, "1 to 256"),
      ((64, 2), jnp.float32, 1, "multiple of 16 bytes"),
      ((33, 128), jnp.float32, 2, "to be a multiple of 2"),
      ((2, 16), jnp.float32, 2, "multiple of 128 bytes"),
      ((3, 32), jnp.float32, 1, "multiple of 128 elements"),
  )
  def test_bad(self, tile, dtype, num_blocks, says):
    with self.assertRaisesRegex(ValueError, says):
      tiles.check_tile(tile, dtype, num_blocks=num_blocks)


class ShippedTest(absltest.TestCase):

  def test_check(self):
    results = check.run()
    self.assertLen(results, 25)
    reasons = collections.defaultdict(set)
    for result in results:
      self.assertTrue(result.ok, result)
      specs, budget, interpret, compiled = result.stages
      self.assertEqual((specs.state, budget.state), ("passed", "passed"))
      self.assertEqual(
          compiled.state,
          "skipped" if aot_support.why_not() else "passed",
      )
      if interpret.state != "passed":
        self.assertEqual(interpret.state, "skipped")
        reasons[interpret.message].add(result.name)
    cannot = f"the GPU interpreter of JAX {jax.__version__} cannot run it: "
    if _HAS_CLUSTER_BARRIERS:
      self.assertEqual(reasons, {
          f"{cannot}collective_axis not supported yet": {
              "blackwell_gemm[two_blocks]"
          },
      })
    else:
      self.assertEqual(reasons.keys(), {
          f"{cannot}it has no cluster barriers",
          f"{cannot}Unsupported memory space: tmem",
      })
      self.assertEqual(
          {result.name for result in results}
          - set.union(*reasons.values()),
          {"hopper_gemm[bf16_alone]", "local_ring[1_consumer]",
           "local_ring[2_consumers]", "local_ring[stores]",
           "local_ring[no_steps]"},
      )

  def test_every_kernel_has_cases_and_says_how_it_works(self):
    modules = {info.name for info in pkgutil.iter_modules(kernels.__path__)}
    helpers = {"tiles", "gemm_tiles", "blackwell_tiles", "by_hand"}
    self.assertEqual(modules - helpers, set(kernels.__all__))
    for name in kernels.__all__:
      module = getattr(kernels, name)
      self.assertEqual(module.__name__, f"jax_mgpu_ext.kernels.{name}")
      for word in ("protocol", "arrive", "wait", "why it is race free"):
        self.assertIn(word, module.__doc__.lower())
      self.assertIn(name, kernels.__doc__)

  def test_package_is_lazy(self):
    output = child.check_output("""
        import sys
        from jax_mgpu_ext import kernels
        assert "cluster_ring" in dir(kernels)
        print([m for m in sys.modules if "pallas" in m])
        print(kernels.cluster_ring.__name__)
        try:
          kernels.no_such_kernel
        except AttributeError as e:
          print(e)
    """)
    self.assertEqual(
        output,
        "[]\njax_mgpu_ext.kernels.cluster_ring\n"
        "module 'jax_mgpu_ext.kernels' has no attribute 'no_such_kernel'\n",
    )


if __name__ == "__main__":
  absltest.main()
