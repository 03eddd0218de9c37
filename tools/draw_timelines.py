"""Draws the timelines that README shows: a GEMM that is right, a ring that hangs.

  python tools/draw_timelines.py           # with JAX 0.11.2 or later, and matplotlib
"""

from __future__ import annotations

import os
import pathlib
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")
_ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(_ROOT))

from absl import app
import jax.numpy as jnp

from jax_mgpu_ext import check
from jax_mgpu_ext import deadlock
from jax_mgpu_ext._src import check_options
from tests.negatives import kernels


def main(argv) -> None:
  if len(argv) > 1:
    raise app.UsageError("expected no arguments")
  folder = _ROOT / "docs"
  case = "jax_mgpu_ext.kernels.hopper_gemm::hopper_gemm[bf16_alone]"
  [result] = check.run(
      [case], stages=["interpret"],
      options=check_options.Options(trace=str(folder / "timeline-gemm.png")),
  )
  assert result.ok, result
  (hangs,) = [
      c for c in kernels.CASES if c.name == "one_consumer_leaves_early"
  ]
  try:
    with deadlock.trace(folder / "timeline-hang.png"):
      deadlock.run(hangs.kernel(True), jnp.zeros((128,), jnp.float32))
  except deadlock.DeadlockError as e:
    print(e.report)


if __name__ == "__main__":
  app.run(main)
