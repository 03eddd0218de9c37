"""Cases that pass, fail, hang and crash, for check_test.py."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np

from jax_mgpu_ext.check import kernel_case

print("noise while importing")

SHAPE = (64, 64)
# Long enough for the slowest machine, short enough for the tests.
HANG_LIMIT_S = 3


def inputs(rng):
  return (rng.integers(-8, 9, SHAPE).astype(np.float32),)


def reference(x):
  return x


def scratch_types():
  return dict(
      stage=plgpu.SMEM(SHAPE, jnp.float32),
      full=plgpu.Barrier(num_arrivals=1, num_barriers=1),
  )


def factory_of(body, **mesh):
  """Returns a kernel factory for a body; all copy `x` to `y` somehow."""

  def factory(interpret=None):
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(SHAPE, jnp.float32),
        scratch_types=scratch_types(),
        interpret=interpret,
        **mesh,
    )

  return factory


def case(name, **arguments):
  return kernel_case(
      **{
          "name": name,
          "inputs": inputs,
          "reference": reference,
          "specs": scratch_types,
          **arguments,
      }
  )


def copy(x, y, *, stage, full):
  plgpu.copy_gmem_to_smem(x, stage, full)
  plgpu.barrier_wait(full)
  y[...] = stage[...]


def copy_plus_one(x, y, *, stage, full):
  plgpu.copy_gmem_to_smem(x, stage, full)
  plgpu.barrier_wait(full)
  y[...] = stage[...] + 1


def read_too_early(x, y, *, stage, full):
  plgpu.copy_gmem_to_smem(x, stage, full)
  y[...] = stage[...]
  plgpu.barrier_wait(full)


def wait_for_nobody(x, y, *, stage, full):
  plgpu.barrier_wait(full)
  copy(x, y, stage=stage, full=full)


def wait_for_each_other(x, y, *, stage, full):
  @pl.when(lax.axis_index("warpgroup") == 0)
  def _first():
    plgpu.barrier_wait(full)
    y[...] = x[...]

  @pl.when(lax.axis_index("warpgroup") == 1)
  def _second():
    plgpu.barrier_wait(full)
    plgpu.barrier_arrive(full)


def predicated_store(x, y, *, stage, full):
  plgpu.copy_gmem_to_smem(x, stage, full)
  plgpu.barrier_wait(full)
  plgpu.copy_smem_to_gmem(stage, y, predicate=lax.axis_index("tile") == 0)
  plgpu.wait_smem_to_gmem(0)


def own_not_implemented(x, y, *, stage, full):
  raise NotImplementedError("this is not supported by me")


def copy_half_per_tile(x, y, *, stage, full):
  plgpu.copy_gmem_to_smem(x, stage, full)
  plgpu.barrier_wait(full)
  half = pl.ds(lax.axis_index("tile") * 32, 32)
  y[half] = stage[half]


two_warpgroups = dict(num_threads=2, thread_name="warpgroup")
one_tile = dict(grid=(1,), grid_names=("tile",))

case("good")(factory_of(copy))
case("wrong_value")(factory_of(copy_plus_one))
case("race")(factory_of(read_too_early))
case("race_ignored", detect_races=False)(factory_of(read_too_early))
case("hang", timeout_s=HANG_LIMIT_S)(factory_of(wait_for_nobody))
case("deadlock", timeout_s=HANG_LIMIT_S)(
    factory_of(wait_for_each_other, **two_warpgroups)
)
case("unsupported")(factory_of(predicated_store, **one_tile))
case("own_not_implemented")(factory_of(own_not_implemented))
case("good_again", rtol=1e-6, atol=1e-6)(factory_of(copy))


def copied_half(x, *, tiles):
  y = np.full_like(x, np.nan)  # As memory that nobody wrote.
  y[: tiles * 32] = x[: tiles * 32]
  return y


# One body for both grids, so a trace of one must not serve the other.
@case(
    "grid",
    params={"1": dict(tiles=1), "2": dict(tiles=2)},
    reference=copied_half,
)
def grid(interpret=None, *, tiles):
  mesh = dict(grid=(tiles,), grid_names=("tile",))
  return factory_of(copy_half_per_tile, **mesh)(interpret)


@case("exit")
def exit_at_once(interpret=None):
  sys.exit(0)


@case("crash")
def crash(interpret=None):
  if interpret is not None:
    print("last words")
    os._exit(3)
  return factory_of(copy)(interpret)


@case("killed")
def killed(interpret=None):
  os.abort()


@case("threads_and_forks")
def threads_and_forks(interpret=None):
  threading.Thread(target=time.sleep, args=(600,)).start()
  os.fork()  # The child comes all the way back, too.
  subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
  return factory_of(copy)(interpret)


def start_daemon():
  """Starts a process that nobody who looks at groups and sessions finds."""
  if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
      time.sleep(600)
    os._exit(0)


@case("daemon")
def daemon(interpret=None):
  start_daemon()
  return factory_of(copy)(interpret)


@case("daemon_of_a_crash")
def daemon_of_a_crash(interpret=None):
  start_daemon()
  os._exit(4)


class NoText(Exception):

  def __str__(self):
    return 1 / 0


@case("no_text")
def no_text(interpret=None):
  raise NoText()


@case("no_text_inside")
def no_text_inside(interpret=None):
  def body(x, y, *, stage, full):
    raise NoText()

  return factory_of(body)(interpret)


@case("long_text")
def long_text(interpret=None):
  raise ValueError("x" * 5_000_000)


@case("log_that_does_not_fit")
def log_that_does_not_fit(interpret=None):
  logging.warning("%d", "not a number")
  return factory_of(copy)(interpret)


@case("closed_connection")
def closed_connection(interpret=None):
  os.closerange(3, 100)
  time.sleep(600)


@case("closed_streams")
def closed_streams(interpret=None):
  sys.stdout.close()
  sys.stderr = None
  return factory_of(copy)(interpret)


case("bad_spec", specs=lambda: [plgpu.Barrier])(factory_of(copy))
case("no_kernel")(lambda interpret: None)
case("bad_inputs", inputs=lambda rng: 1 / 0)(factory_of(copy))
case("one_array_as_inputs", inputs=lambda rng: inputs(rng)[0])(
    factory_of(copy)
)
case("bad_reference", reference=lambda x: x.no_such_attribute)(factory_of(copy))
case("other_shape", reference=lambda x: x[:1])(factory_of(copy))
case("for_b200", targets=("b200",))(factory_of(copy))
