"""What an aval costs: `ref_aval` against JAX's own `get_ref_aval`, paired.

  python -m benchmarks.aval_dispatch

Prints microseconds and ratios of medians; both sides alternate in one process.
Then the time of a tree against its number of leaves, as a ratio per leaf.
"""

from __future__ import annotations

import os
import statistics
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from absl import app
from absl import flags
import jax.numpy as jnp

import jax_mgpu_ext
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax_mgpu_ext import avals

_ROUNDS = flags.DEFINE_integer("rounds", 60, "Pairs of measurements a spec.")
_CALLS = flags.DEFINE_integer("calls", 200, "Calls in one measurement.")
_LEAVES = flags.DEFINE_integer("leaves", 100_000, "Leaves of the largest tree.")
_CHECK = flags.DEFINE_bool(
    "check", False, "Exit status 1 if a bound of the README is missed."
)

_MAX_SEEN_US = 2.0
_MAX_NEW_RATIO = 1.2
_MAX_GROWTH = 1.5

_TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
SPECS = {
    "barrier": lambda i: plgpu.Barrier(num_barriers=i),
    "cluster barrier": lambda i: plgpu.ClusterBarrier(
        collective_axes=("x",), num_barriers=i
    ),
    "SMEM": lambda i: plgpu.SMEM((i, 128), jnp.float32),
    "tiled SMEM": lambda i: plgpu.SMEM(
        (i, 64, 64), jnp.float16, transforms=_TILED
    ),
    "TMEM": lambda i: plgpu.TMEM((i, 128, 128), jnp.float32),
    "accumulator": lambda i: plgpu.ACC((64, 8 * i)),
    "RefUnion": lambda i: plgpu.RefUnion(
        plgpu.SMEM((i, 128), jnp.float32), plgpu.SMEM((128,), jnp.float32)
    ),
    "semaphore": lambda i: plgpu.SemaphoreType.REGULAR((i,)),
}


def _time_us(function, arguments) -> float:
  start = time.perf_counter()
  for argument in arguments:
    function(argument)
  return (time.perf_counter() - start) / len(arguments) * 1e6


def _upstream(spec):
  return spec.get_ref_aval()


def measure(make) -> tuple[float, float, float, float]:
  """Returns (upstream us, new us, seen us, new / upstream of the pairs)."""
  seen = [make(1)] * _CALLS.value
  upstream, new, known, ratios = [], [], [], []
  next_size = 1
  for round_ in range(_ROUNDS.value):
    # Specs that neither side has met, since JAX interns array avals.
    batches = []
    for _ in range(2):
      batches.append([make(next_size + i) for i in range(_CALLS.value)])
      next_size += _CALLS.value
    if round_ % 2:  # Who goes first alternates.
      times = (_time_us(_upstream, batches[0]), _time_us(
          avals.ref_aval, batches[1]))
    else:
      times = tuple(reversed((
          _time_us(avals.ref_aval, batches[1]), _time_us(
              _upstream, batches[0]))))
    upstream.append(times[0])
    new.append(times[1])
    ratios.append(times[1] / times[0])
    known.append(_time_us(avals.ref_aval, seen))
  return tuple(map(statistics.median, (upstream, new, known, ratios)))


def measure_growth() -> float:
  """Returns time per leaf of the largest tree over that of a tenth of it."""
  specs = [make(i) for make in SPECS.values() for i in range(1, 5)]
  small = [specs[i % len(specs)] for i in range(_LEAVES.value // 10)]
  large = [specs[i % len(specs)] for i in range(_LEAVES.value)]
  ratios = []
  for _ in range(7):
    times = []
    for tree in (small, large):
      start = time.perf_counter()
      avals.ref_avals(tree)
      times.append((time.perf_counter() - start) / len(tree))
    ratios.append(times[1] / times[0])
  return statistics.median(ratios)


def main(argv) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"expected no arguments, got {argv[1:]}")
  missed = []
  print(f"{'spec':<16}{'JAX us':>9}{'new us':>9}{'new/JAX':>9}{'seen us':>9}")
  for name, make in SPECS.items():
    upstream, new, seen, ratio = measure(make)
    print(f"{name:<16}{upstream:9.2f}{new:9.2f}{ratio:9.2f}{seen:9.2f}")
    if seen > _MAX_SEEN_US:
      missed.append(f"{name}: seen {seen:.2f} us > {_MAX_SEEN_US} us")
    if ratio > _MAX_NEW_RATIO:
      missed.append(f"{name}: new {ratio:.2f} > {_MAX_NEW_RATIO}")
  growth = measure_growth()
  print(f"time per leaf, {_LEAVES.value:,} leaves over a tenth: {growth:.2f}")
  if growth > _MAX_GROWTH:
    missed.append(f"growth {growth:.2f} > {_MAX_GROWTH}")
  for line in missed:
    print(f"MISSED {line}")
  if missed and _CHECK.value:
    raise SystemExit(1)


if __name__ == "__main__":
  app.run(main)
