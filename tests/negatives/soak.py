"""Runs all negatives and their twins, many times, beside busy processes.

  python -m tests.negatives.soak --times 20

Exit status 1 if any was reported as something else, or took too long.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from absl import app
from absl import flags
import jax.numpy as jnp

from jax_mgpu_ext import deadlock
from jax_mgpu_ext._src.deadlock import turns
from tests.negatives import kernels

_TIMES = flags.DEFINE_integer("times", 20, "How often each is run.")
_BUSY = flags.DEFINE_integer("busy", 2, "Busy processes beside it.")
# From the last event of the kernel to the exception.
_LIMIT_S = 2.0


def _run(case, bad, x) -> tuple[str, float]:
  kernel = case.kernel(bad)
  try:
    deadlock.run(kernel, x, timeout_s=case.timeout_s if bad else None)
    outcome = "ok"
  except deadlock.DeadlockError as e:
    outcome = e.code
  return outcome, time.monotonic() - turns.last_heard_s


def main(argv) -> None:
  if len(argv) > 1:
    raise app.UsageError("expected no arguments")
  x = jnp.zeros((128,), jnp.float32)
  busy = [
      subprocess.Popen([sys.executable, "-c", "while True: pass"])
      for _ in range(_BUSY.value)
  ]
  wrong, longest_s, runs = [], 0.0, 0
  try:
    for round_ in range(_TIMES.value):
      for case in kernels.CASES:
        for bad in (True, False):
          outcome, seconds = _run(case, bad, x)
          runs += 1
          if case.timeout_s:
            seconds = 0.0  # They are ended by the clock.
          longest_s = max(longest_s, seconds)
          if outcome != (case.code if bad else "ok") or seconds > _LIMIT_S:
            wrong.append((round_, case.name, bad, outcome, seconds))
  finally:
    for process in busy:
      process.kill()
      process.wait()
  for entry in wrong:
    print(*entry)
  print(
      f"{runs} runs of {len(kernels.CASES)} kernels and twins, {len(wrong)} wrong;"
      f" at most {longest_s:.2f} s from the last wait to the end"
  )
  if wrong:
    raise SystemExit(1)


if __name__ == "__main__":
  app.run(main)
