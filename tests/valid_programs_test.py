"""With hooks on, valid programs trace and lower to the same text."""

from __future__ import annotations

import concurrent.futures
import json

from absl.testing import absltest
from absl.testing import parameterized

from tests import child
from tests import valid_kernels

# One process for each mode: JAX numbers the kernels of a process.
_LOWER = """
import hashlib, json, sys
import jax
import jax_mgpu_ext
from tests import valid_kernels

report = dict(active=jax_mgpu_ext.hooks.is_active(), kernels={})
for make in valid_kernels.KERNELS:
  function, arguments = make()
  traced = jax.jit(function).trace(*arguments)
  platform = "cpu" if make is valid_kernels.plain_pallas_call else "cuda"
  # Holds the kernel as bytecode, source lines included.
  text = traced.lower(lowering_platforms=(platform,)).as_text(debug_info=True)
  report["kernels"][make.__name__] = dict(
      jaxpr=str(traced.jaxpr).replace(hex(id(valid_kernels._AXIS)), "AXIS"),
      lowered=hashlib.sha256(text.encode()).hexdigest(),
      names_own_source="valid_kernels.py" in text,
      names_plugin="jax_mgpu_ext" in text,
  )
print(json.dumps(report))
"""


def _lower(mode: str):
  return json.loads(child.check_output(_LOWER, env={"JAX_MGPU_EXT": mode}))


class ValidProgramsTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
      cls._on, cls._off = pool.map(_lower, ("strict", "off"))

  def test_modes(self):
    self.assertTrue(self._on["active"])
    self.assertFalse(self._off["active"])

  @parameterized.named_parameters(
      (make.__name__, make.__name__) for make in valid_kernels.KERNELS
  )
  def test_same_text(self, name):
    on, off = self._on["kernels"][name], self._off["kernels"][name]
    self.assertEqual(on["jaxpr"], off["jaxpr"])
    self.assertEqual(on["lowered"], off["lowered"])
    self.assertFalse(on["names_plugin"])

  def test_the_texts_would_show_a_difference(self):
    kernels = self._on["kernels"].values()
    self.assertLen({k["lowered"] for k in kernels}, len(kernels))
    # All but the one that is interpreted on the CPU.
    self.assertEqual(
        sum(k["names_own_source"] for k in kernels), len(kernels) - 1
    )


if __name__ == "__main__":
  absltest.main()
