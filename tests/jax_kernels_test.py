"""JAX's own Hopper and Blackwell kernels, compiled, with hooks and without."""

from __future__ import annotations

import concurrent.futures
import json

from absl.testing import absltest
from absl.testing import parameterized

from jax_mgpu_ext import aot
from tests import aot_support
from tests import child

_PROGRAM = '''
import json
import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.gpu import attention_mgpu
from jax.experimental.pallas.ops.gpu import blackwell_matmul_mgpu
from jax.experimental.pallas.ops.gpu import blackwell_ragged_dot_mgpu
from jax.experimental.pallas.ops.gpu import hopper_matmul_mgpu
from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu
from jax_mgpu_ext import aot

def half(*shape):
  return jax.ShapeDtypeStruct(shape, jnp.float16)

def hopper_matmul(a, b):
  config = hopper_matmul_mgpu.TuningConfig(
      tile_m=128, tile_n=128, tile_k=64, max_concurrent_steps=4,
      cluster_dimension=hopper_matmul_mgpu.MatmulDimension.M)
  return hopper_matmul_mgpu.matmul(a, b, None, config)

def attention(q, k, v):
  config = attention_mgpu.TuningConfig(
      block_q=64, block_kv=128, max_concurrent_steps=2)
  return attention_mgpu.attention(q, k, v, config)

def ragged_dot(a, b, group_sizes):
  return ragged_dot_mgpu.ragged_dot(
      a, b, group_sizes=group_sizes, block_m=64, block_n=128, block_k=64,
      max_concurrent_steps=2, grid_block_n=1)

def blackwell_matmul(a, b):
  config = blackwell_matmul_mgpu.TuningConfig(
      tile_m=128, tile_n=128, tile_k=64, max_concurrent_steps=4,
      collective=True)
  return blackwell_matmul_mgpu.matmul_kernel(a, b, config)

def blackwell_ragged_dot(a, b, group_sizes):
  config = blackwell_ragged_dot_mgpu.TuningConfig(
      tile_m=128, tile_n=128, tile_k=64, max_concurrent_steps=4,
      collective=True, grid_tile_width=1,
      grid_minor_dim=blackwell_matmul_mgpu.MatmulDimension.N)
  return blackwell_ragged_dot_mgpu.ragged_dot_kernel(a, b, group_sizes, config)

groups = jax.ShapeDtypeStruct((4,), jnp.int32)
square = half(1024, 512), half(512, 1024)
programs = dict(
    hopper_matmul=(hopper_matmul, "h100", square),
    attention=(attention, "h100", [half(1, 1024, 4, 64)] * 3),
    ragged_dot=(ragged_dot, "h100", [half(512, 256), half(4, 256, 512), groups]),
    blackwell_matmul=(blackwell_matmul, "b200", square),
    blackwell_ragged_dot=(
        blackwell_ragged_dot, "b200",
        [half(1024, 512), half(4, 512, 1024), groups]),
)
report = {}
for name, (function, target, arguments) in programs.items():
  code = aot.compile_kernel(function, *arguments, target=target, cache=False)
  report[name] = dict(
      ptx=code.ptx, sass=code.sass, registers=code.registers,
      spills=code.spill_bytes, smem=code.smem_bytes, cluster=code.cluster_size,
      budget=[r.smem_bytes for r in code.resources],
      classes=code.class_counts())
print(json.dumps(report))
'''
_NAMES = (
    "hopper_matmul", "attention", "ragged_dot", "blackwell_matmul",
    "blackwell_ragged_dot",
)


def _compile(mode: str):
  output = child.check_output(
      _PROGRAM, env={"JAX_MGPU_EXT": mode}, timeout_s=300
  )
  return json.loads(output.splitlines()[-1])


@aot_support.needs_compiler
class JaxKernelsTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
      cls._on, cls._off = pool.map(_compile, ("strict", "off"))

  @parameterized.parameters(*_NAMES)
  def test_hooks_make_no_difference(self, name):
    on, off = self._on[name], self._off[name]
    aot.assert_same_code(on["ptx"], off["ptx"])
    aot.assert_same_code(on["sass"], off["sass"])
    for key in ("registers", "spills", "smem", "cluster", "classes"):
      self.assertEqual(on[key], off[key])

  @parameterized.parameters(*_NAMES)
  def test_budget_is_what_is_launched(self, name):
    for report in (self._on[name], self._off[name]):
      self.assertEqual(report["budget"], [report["smem"]])

  def test_instructions(self):
    for name in ("hopper_matmul", "attention", "ragged_dot"):
      self.assertGreater(self._on[name]["classes"]["wgmma"], 0, name)
      self.assertEqual(self._on[name]["classes"]["tcgen05"], 0, name)
      aot.assert_contains(self._on[name]["sass"], "HGMMA")
    for name in ("blackwell_matmul", "blackwell_ragged_dot"):
      self.assertGreater(self._on[name]["classes"]["tcgen05"], 0, name)
      self.assertEqual(self._on[name]["classes"]["wgmma"], 0, name)
      self.assertEqual(self._on[name]["cluster"], 2, name)
    self.assertEqual(self._on["hopper_matmul"]["cluster"], 2)
    aot.assert_contains(
        self._on["hopper_matmul"]["sass"], "UTMALDG.*MULTICAST"
    )
    self.assertTrue(all(self._on[name]["spills"] == 0 for name in _NAMES))


if __name__ == "__main__":
  absltest.main()
