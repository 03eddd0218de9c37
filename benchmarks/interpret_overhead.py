"""What seeing hangs costs in interpret mode, and what recording a timeline does.

  python -m benchmarks.interpret_overhead

Runs a ring of many steps in JAX's interpreter, by itself, with hooks on, and with
hooks on inside `deadlock.trace`, in turn, and prints ratios of the pairs. Exit status 1
if one is above its bound.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from absl import app
from absl import flags
import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

import jax_mgpu_ext
from jax_mgpu_ext import deadlock
from jax_mgpu_ext import specs

_ROUNDS = flags.DEFINE_integer("rounds", 12, "Measurements of each.")
_STEPS = flags.DEFINE_integer("steps", 100, "Steps of the ring.")
_RACES = flags.DEFINE_bool("detect_races", True, "Interpret with race detection.")

_MAX_DETECTION = 1.05
_MAX_RECORDING = 1.10


def _kernel(num_steps: int):
  """A producer and two consumers; 64 KiB a stage, as in a small GEMM."""

  def body(x, o, *, ring):
    del o
    wg = lax.axis_index("wg")

    @pl.when(wg == 0)
    def _producer():
      @pl.loop(0, num_steps)
      def _fill(step):
        ring.producer_acquire(step)
        ring.copy_in(x, step=step)
      ring.producer_tail(num_steps)

    @pl.when(wg > 0)
    def _consumer():
      @pl.loop(0, num_steps)
      def _drain(step):
        tile = ring.consumer_wait(step)
        tile[...]  # pylint: disable=pointless-statement
        ring.consumer_release(step)

  return jax.jit(plgpu.kernel(
      body, out_type=jax.ShapeDtypeStruct((128,), jnp.float32),
      scratch_types=dict(ring=specs.RingBuffer(
          plgpu.SMEM((128, 128), jnp.float32), 3, num_consumers=2,
          consumer_reads="generic")),
      num_threads=3, thread_name="wg",
      interpret=plgpu.InterpretGPUParams(detect_races=_RACES.value),
  ))


def _time_s(function, x) -> float:
  started = time.perf_counter()
  jax.block_until_ready(function(x))
  return time.perf_counter() - started


def main(argv) -> None:
  if len(argv) > 1:
    raise app.UsageError("expected no arguments")
  x = jnp.zeros((128, 128), jnp.float32)
  jax_mgpu_ext.deactivate()
  alone, hooked = _kernel(_STEPS.value), _kernel(_STEPS.value)
  times: dict[str, list[float]] = dict(alone=[], hooked=[], traced=[])

  def run_alone():
    jax.block_until_ready(alone(x))
    times["alone"].append(_time_s(alone, x))

  def run_hooked():
    with jax_mgpu_ext.activated():
      # JAX 0.11 traces again after an activation, which is no part of a run.
      jax.block_until_ready(hooked(x))
      times["hooked"].append(_time_s(hooked, x))

  def run_traced():
    with jax_mgpu_ext.activated(), tempfile.TemporaryDirectory() as folder:
      jax.block_until_ready(hooked(x))
      with deadlock.trace(os.path.join(folder, "out.json")):
        times["traced"].append(_time_s(hooked, x))

  ways = [run_alone, run_hooked, run_traced]
  for way in ways:  # Traced and compiled in the state that they are measured in.
    way()
  times = {name: [] for name in times}
  for round_ in range(_ROUNDS.value):
    # Who goes first alternates.
    for number in range(3):
      ways[(round_ + number) % 3]()
  failed = False
  for name, what, most in (
      ("hooked", "detection", _MAX_DETECTION),
      ("traced", "detection and recording", _MAX_RECORDING),
  ):
    ratios = sorted(a / b for a, b in zip(times[name], times["alone"]))
    middle = statistics.median(ratios)
    failed |= middle > most
    print(
        f"{what}: {middle:.3f} of the time without (from {ratios[0]:.3f} to"
        f" {ratios[-1]:.3f}, {len(ratios)} pairs; at most {most})"
    )
  if failed:
    raise SystemExit(1)


if __name__ == "__main__":
  app.run(main)
