"""What `import jax_mgpu_ext` costs over `import jax`.

Starts pairs of fresh processes, one of each kind in turn, so that both see the
same load of the machine, and compares the medians. Also counts the Pallas
modules that the import loads, of which there must be none.

  python benchmarks/import_time.py --pairs=20
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys

from absl import app
from absl import flags

_PAIRS = flags.DEFINE_integer(
    "pairs", 20, "Pairs of processes to measure.", lower_bound=3
)
_LIMIT_MS = flags.DEFINE_float(
    "limit_ms", 30.0, "Fail if the medians differ by more, in milliseconds."
)

_PROGRAM = """
import json, sys, time
start = time.perf_counter()
import {modules}
seconds = time.perf_counter() - start
pallas = sorted(m for m in sys.modules if "pallas" in m)
print(json.dumps({{"seconds": seconds, "pallas": pallas}}))
"""


def measure(modules: str) -> tuple[float, list[str]]:
  """Imports modules in a process of their own.

  Args:
    modules: What stands behind `import`.

  Returns:
    The time it took, in milliseconds, and the Pallas modules loaded by then.
  """
  done = subprocess.run(
      [sys.executable, "-c", _PROGRAM.format(modules=modules)],
      env={"JAX_PLATFORMS": "cpu", **os.environ},
      capture_output=True,
      text=True,
      check=True,
  )
  found = json.loads(done.stdout)
  return 1e3 * found["seconds"], found["pallas"]


def main(argv: list[str]) -> int:
  if len(argv) > 1:
    raise app.UsageError(f"expected flags only, got {argv[1]!r}")
  kinds = ("jax", "jax, jax_mgpu_ext")
  for kind in kinds:  # Fills the file cache, and writes the .pyc files.
    measure(kind)
  times: dict[str, list[float]] = {kind: [] for kind in kinds}
  pallas: list[str] = []
  for i in range(_PAIRS.value):
    for kind in kinds if i % 2 else reversed(kinds):
      taken, modules = measure(kind)
      times[kind].append(taken)
      pallas += modules
  jax_alone, both = (statistics.median(times[kind]) for kind in kinds)
  extra = both - jax_alone
  print(f"import jax                {jax_alone:8.1f} ms")
  print(f"import jax, jax_mgpu_ext  {both:8.1f} ms")
  limit = f"(limit {_LIMIT_MS.value:g})"
  print(f"difference                {extra:8.1f} ms {limit}")
  print(f"ratio                     {both / jax_alone:8.3f}")
  print(f"Pallas modules loaded     {len(set(pallas)):6d}")
  if pallas:
    print(f"loaded: {', '.join(sorted(set(pallas)))}", file=sys.stderr)
  return int(bool(pallas) or extra > _LIMIT_MS.value)


if __name__ == "__main__":
  app.run(main)
