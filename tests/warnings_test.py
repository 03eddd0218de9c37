"""Warnings of JAX name the user's line, hooks or not."""

from __future__ import annotations

from absl.testing import absltest
from absl.testing import parameterized

from tests import child
from tests import lowering

_WARN = """
import os, sys, warnings
os.environ["JAX_MGPU_EXT"] = sys.argv[1]
import jax_mgpu_ext
import jax
from jax.experimental.pallas import mosaic_gpu as plgpu
struct = jax.ShapeDtypeStruct((8,), "float32")
def body(*refs): pass
calls = dict(
    keyword=lambda: plgpu.kernel(body, out_shape=struct),
    positional=lambda: plgpu.kernel(body, struct),
    scratch=lambda: plgpu.kernel(
        body, out_type=struct, scratch_shapes=[plgpu.Barrier()]),
    both=lambda: plgpu.kernel(body, struct, scratch_shapes=[plgpu.Barrier()]),
    neither=lambda: plgpu.kernel(body, out_type=struct),
    twice=lambda: plgpu.kernel(body, struct, out_type=struct),
)
for name, call in calls.items():
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    try:
      call()
    except ValueError as e:
      # The error is what counts; JAX's warning before it names us.
      print(name, str(e).partition(".")[0])
      continue
  print(name, [(w.category.__name__, str(w.message), w.filename, w.lineno)
               for w in caught])
"""


class WarningsTest(parameterized.TestCase):

  def test_deprecated_keywords(self):
    if lowering.version() >= (0, 11, 2):
      self.skipTest("this release has no deprecated keyword of plgpu.kernel")
    on, off = (child.check_output(_WARN, mode) for mode in ("on", "off"))
    self.assertEqual(on, off)
    self.assertEqual(on.count("'<string>'"), 4)


if __name__ == "__main__":
  absltest.main()
