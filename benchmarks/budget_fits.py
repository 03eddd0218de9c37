"""What the predicate of an autotuner costs: `fits` for ten specs seen before.

  python -m benchmarks.budget_fits

Prints microseconds per call, with `budget` of the same specs beside it, and the
ratio. Exit status 1 if `fits` is above its bound.
"""

from __future__ import annotations

import os
import statistics
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from absl import app
from absl import flags
import jax.numpy as jnp

from jax.experimental.pallas import mosaic_gpu as plgpu
from jax_mgpu_ext import budget

_ROUNDS = flags.DEFINE_integer("rounds", 60, "Measurements of each.")
_CALLS = flags.DEFINE_integer("calls", 200, "Calls in one measurement of fits.")

_MAX_FITS_US = 50.0

_TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
_HOPPER = dict(
    ring=dict(
        lhs=plgpu.SMEM((4, 128, 64), jnp.float16, transforms=_TILED),
        rhs=plgpu.SMEM((4, 64, 128), jnp.float16, transforms=_TILED),
        full=plgpu.Barrier(num_arrivals=2, num_barriers=4),
        empty=plgpu.ClusterBarrier(collective_axes=("x",), num_barriers=4),
    ),
    out=plgpu.SMEM((128, 128), jnp.float16, transforms=_TILED),
    acc=plgpu.ACC((64, 128)),
    shared=plgpu.RefUnion(
        plgpu.SMEM((128,), jnp.float32), plgpu.SMEM((64,), jnp.float32)
    ),
    scales=[plgpu.SMEM((128,), jnp.float32) for _ in range(2)],
    done=plgpu.Barrier(num_barriers=()),
)
_BLACKWELL = dict(
    _HOPPER,
    acc=plgpu.TMEM((128, 256), jnp.float32),
    done=plgpu.Barrier(num_barriers=(), orders_tensor_core=True),
)
CASES = {
    "h100": (_HOPPER, dict(cluster=(2,))),
    "b200": (_BLACKWELL, dict(cluster=(2,), num_threads=4)),
}


def _time_us(function, calls: int) -> float:
  start = time.perf_counter()
  for _ in range(calls):
    function()
  return (time.perf_counter() - start) / calls * 1e6


def measure(specs, target: str, mesh) -> tuple[float, float, float]:
  """Returns (us of `fits`, us of `budget`, ratio of the pairs): medians."""
  fits = lambda: budget.fits(specs, target, **mesh)
  whole = lambda: budget.budget(specs, target, **mesh)
  assert fits() and whole().fits
  pairs = []
  for round_ in range(_ROUNDS.value):
    # Who goes first alternates.
    if round_ % 2:
      pair = _time_us(fits, _CALLS.value), _time_us(whole, 20)
    else:
      whole_us = _time_us(whole, 20)
      pair = _time_us(fits, _CALLS.value), whole_us
    pairs.append((*pair, pair[0] / pair[1]))
  return tuple(map(statistics.median, zip(*pairs)))


def main(argv) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"expected no arguments, got {argv[1:]}")
  missed = []
  print(f"{'target':<8}{'fits us':>9}{'budget us':>11}{'ratio':>8}")
  for target, (specs, mesh) in CASES.items():
    fits, whole, ratio = measure(specs, target, mesh)
    print(f"{target:<8}{fits:9.2f}{whole:11.2f}{ratio:8.3f}")
    if fits > _MAX_FITS_US:
      missed.append(f"{target}: {fits:.2f} us > {_MAX_FITS_US} us")
  for line in missed:
    print(f"MISSED {line}")
  if missed:
    raise SystemExit(1)


if __name__ == "__main__":
  app.run(main)
