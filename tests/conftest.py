"""What absl's own test runner does and pytest does not, and a place to write to."""

from __future__ import annotations

import os
import tempfile

from absl import flags
from absl.testing import absltest  # Defines the flag. pylint: disable=unused-import


def pytest_sessionstart(session):
  """Gives absl's flags their values; each worker gets a folder of its own."""
  folder = tempfile.TemporaryDirectory(prefix="mgpu-ext-tests-")
  session.config.add_cleanup(folder.cleanup)
  flags.FLAGS(["pytest", f"--test_tmpdir={folder.name}"])
  # What the tests compile is not kept among what the user has compiled.
  os.environ["JAX_MGPU_EXT_CACHE_DIR"] = os.path.join(folder.name, "compiled")
  # As in a worker of `mgpu-ext check`: interpreted clusters need many threads.
  os.environ.setdefault("NPROC", "32")
