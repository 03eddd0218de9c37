#!/usr/bin/env python3
"""Works on the patches against JAX; `--help` shows the commands.

    python tools/patchset.py check
    python tools/patchset.py overlay --out DIR

Needs git, and for most commands the JAX that a series is for.
"""

from __future__ import annotations

import os
import pathlib
import sys

# Whoever handles patches wants JAX as it is.
os.environ["JAX_MGPU_EXT"] = "off"

_ROOT = pathlib.Path(__file__).resolve().parent.parent
if str(_ROOT) not in sys.path:
  sys.path.insert(0, str(_ROOT))  # The tool runs without an installation.

# pylint: disable=g-import-not-at-top,wrong-import-position
from jax_mgpu_ext._src import patchset

if __name__ == "__main__":
  sys.exit(patchset.main())
