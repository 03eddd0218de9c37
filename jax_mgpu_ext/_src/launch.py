"""Tells whether this process is our own command line."""

from __future__ import annotations

import os
import sys


def is_own_command() -> bool:
  """Returns whether this is `mgpu-ext` or `python -m jax_mgpu_ext`.

  These import the package before a line of theirs runs, and want to report a
  bad environment variable in their own way, so the import must not raise there.
  """
  name = os.path.basename(sys.argv[0]) if sys.argv else ""
  if name == "-m":  # Python is still looking for the module to run.
    return "jax_mgpu_ext" in sys.orig_argv
  return name in ("mgpu-ext", "mgpu-ext.exe")
