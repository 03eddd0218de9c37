"""What the tests that compile share."""

from __future__ import annotations

import tempfile
import unittest

from absl.testing import absltest
from absl.testing import parameterized

from jax_mgpu_ext._src import config
from jax_mgpu_ext._src import errors
from jax_mgpu_ext._src.aot import compilers
from jax_mgpu_ext._src.aot import toolchain


def why_not() -> str:
  """Returns why kernels cannot be compiled here, empty if they can."""
  try:
    toolchain.find(sass=True)
  except errors.AotUnavailableError as e:
    return str(e)
  return ""


needs_compiler = unittest.skipIf(why_not(), why_not())


class CompilingTestCase(parameterized.TestCase):
  """Has a cache of its own, and ends its compilers."""

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.addClassCleanup(compilers.shut_down)

  def setUp(self):
    super().setUp()
    self.cache_dir = self.enter_context(tempfile.TemporaryDirectory())
    self.enter_context(
        absltest.mock.patch.dict(
            "os.environ", {config.CACHE_DIR_VARIABLE: self.cache_dir}
        )
    )
