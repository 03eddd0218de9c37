"""The steps of a ring: their stages, and the waits of its producer."""

from __future__ import annotations

import operator
from typing import Any

from jax import lax
from jax._src import source_info_util
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np

from jax_mgpu_ext._src import errors
from jax_mgpu_ext._src import spec_text


def as_step(step: Any, name: str = "step") -> Any:
  """Returns a step as an int if it is static, else as a traced int32.

  Raises:
    SpecError: It is negative (and a `TypeError`, if it is no integer).
  """
  try:
    number = operator.index(step)
  except TypeError:  # Traced, or no integer.
    number = None
  if number is not None and not isinstance(step, bool):
    if number < 0:
      raise errors.SpecError(
          f"steps of a ring are counted from 0, got {name}={number}",
          code="MGPU125", hint=f"Write {name}=0 or more",
      )
    return number
  dtype = getattr(step, "dtype", None)
  if (
      dtype is None or getattr(step, "shape", None) != ()
      or not jnp.issubdtype(dtype, jnp.integer)
  ):
    raise errors.SpecTypeError(
        "expected a step of a ring, static or traced, got"
        f" {name}={spec_text.describe(step)}",
        code="MGPU125", hint="Pass an integer, or a traced int32",
    )
  if dtype != jnp.int32:
    return lax.convert_element_type(step, jnp.int32)
  return step


def index_of(step: Any, num_stages: int) -> Any:
  """Returns the stage of a step: an int, if the step is one."""
  step = as_step(step)
  if isinstance(step, int):
    return step % num_stages
  # Of the same type as the step, also where Python's integers have 64 bits.
  return lax.rem(step, np.int32(num_stages))


def wait_until_free(empty: Any, step: Any, num_stages: int) -> None:
  """Waits for the release of a step's stage; does not in the first lap."""
  step = as_step(step)
  index = index_of(step, num_stages)
  if isinstance(step, int):
    if step >= num_stages:
      plgpu.barrier_wait(empty.at[index])
    return

  line = source_info_util.current().traceback

  @pl.when(step >= num_stages)
  def _wait():
    # In here the stack ends at `pl.when`, and the wait would have no line.
    with source_info_util.user_context(line):
      plgpu.barrier_wait(empty.at[index])


def wait_until_all_free(empty: Any, num_steps: Any, num_stages: int) -> None:
  """Waits for the releases that no later step waits for."""
  num_steps = as_step(num_steps, "num_steps")
  first = max(0, num_steps - num_stages) if isinstance(
      num_steps, int
  ) else lax.max(num_steps - np.int32(num_stages), np.int32(0))

  line = source_info_util.current().traceback

  @pl.loop(first, num_steps)
  def _wait(step):
    with source_info_util.user_context(line):
      plgpu.barrier_wait(empty.at[index_of(step, num_stages)])
