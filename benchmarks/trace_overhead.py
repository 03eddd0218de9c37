"""What the hooks add to tracing and lowering a kernel, paired.

  python -m benchmarks.trace_overhead

Traces and lowers each shipped kernel for CUDA with hooks on and off in turn, in
one process, and prints the ratio of medians. Every round builds the kernel
anew, so that nothing is reused.
"""

from __future__ import annotations

import gc
import os
import statistics
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from absl import app
from absl import flags
import jax
import numpy as np

import jax_mgpu_ext
from jax_mgpu_ext import kernels

_ROUNDS = flags.DEFINE_integer("rounds", 40, "Pairs of measurements a kernel.")
_CHECK = flags.DEFINE_bool(
    "check", False, "Exit status 1 if the overall ratio is above the limit."
)
_LIMIT = flags.DEFINE_float("limit", 1.03, "The largest overall ratio.")


def _lower_ms(module) -> float:
  arguments = module.make_inputs(np.random.default_rng(0))
  gc.collect()
  gc.disable()
  start = time.perf_counter()
  kernel = module.make_kernel()
  kernel.trace(*arguments).lower(lowering_platforms=("cuda",))
  elapsed = time.perf_counter() - start
  gc.enable()
  jax.clear_caches()
  return elapsed * 1e3


def measure(module) -> tuple[float, float]:
  """Returns the median milliseconds with hooks on, and off."""
  times: dict[bool, list[float]] = {True: [], False: []}
  for round_ in range(_ROUNDS.value + 1):
    for active in (True, False) if round_ % 2 else (False, True):
      (jax_mgpu_ext.activate if active else jax_mgpu_ext.deactivate)()
      elapsed = _lower_ms(module)
      if round_:  # The first round warms up.
        times[active].append(elapsed)
  jax_mgpu_ext.activate()
  return statistics.median(times[True]), statistics.median(times[False])


def main(argv) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"expected no arguments, got {argv[1:]}")
  print(f"{'kernel':<16}{'on ms':>9}{'off ms':>9}{'on/off':>9}")
  ratios = []
  for name in kernels.__all__:
    on, off = measure(getattr(kernels, name))
    ratios.append(on / off)
    print(f"{name:<16}{on:9.2f}{off:9.2f}{on / off:9.3f}")
  overall = statistics.geometric_mean(ratios)
  print(f"overall ratio: {overall:.3f} (limit {_LIMIT.value})")
  if _CHECK.value and overall > _LIMIT.value:
    raise SystemExit(1)


if __name__ == "__main__":
  app.run(main)
