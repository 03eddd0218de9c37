"""`python -m jax_mgpu_ext`, the same as the command `mgpu-ext`."""

from __future__ import annotations

import sys

from jax_mgpu_ext._src import cli

if __name__ == "__main__":
  sys.exit(cli.main())
