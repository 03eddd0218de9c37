"""What each stage does with a case; runs in a child process.

A stage is a function of a `KernelCase` and `Options`. It returns if the case
passed, raises `StageSkipped` with the reason if it cannot be carried out here,
`StageFailed` if it can say what is wrong, and lets any other exception of the
case pass.
"""

from __future__ import annotations

from collections.abc import Callable
import contextlib
from typing import Any
import zlib

import jax
import jax.numpy as jnp
import numpy as np

from jax_mgpu_ext import avals
from jax_mgpu_ext._src import budget_kernel
from jax_mgpu_ext._src import check_interpreter
from jax_mgpu_ext._src import check_reports
from jax_mgpu_ext._src import errors
from jax_mgpu_ext._src import kernel_calls
from jax_mgpu_ext._src import texts
from jax_mgpu_ext._src.check_cases import KernelCase
from jax_mgpu_ext._src.check_cases import StageFailed
from jax_mgpu_ext._src.check_cases import StageSkipped
from jax_mgpu_ext._src.check_options import Options
from jax_mgpu_ext._src.deadlock import running


def specs(case: KernelCase, options: Options) -> None:
  """Every spec has an aval; the kernel can be traced and lowered for CUDA."""
  tree = case.make_specs()
  if tree is not None:
    avals.ref_avals(tree)
  inputs = make_inputs(case)
  kernel = make_kernel(case, None)
  traced = jax.jit(kernel).trace(*inputs)
  calls = list(kernel_calls.find(traced.jaxpr))
  if any(call.interpreted for call in calls):
    raise StageFailed(
        "the factory was called with interpret=None, and built a kernel for"
        " interpret mode: pass its argument on, as plgpu.kernel(...,"
        " interpret=interpret)"
    )
  try:
    traced.lower(lowering_platforms=("cuda",))
  except ValueError as error:
    if "exceeds available shared memory" in texts.text_of(error):
      # JAX says how much is too much; the budget, what it goes to.
      for call in calls:
        for target in options.targets:
          budget_kernel.budget_kernel(call, target).raise_if_over()
    raise


def interpret(case: KernelCase, options: Options) -> None:
  """In interpret mode the kernel is right, and free of races."""
  inputs = make_inputs(case)
  # A copy: neither the kernel nor the reference may change the other's inputs.
  want = case.make_reference(*jax.tree.map(np.array, inputs))
  kernel = make_kernel(
      case, check_interpreter.parameters(detect_races=case.detect_races)
  )
  with check_interpreter.Watch() as watch, _trace(options):
    try:
      got = jax.block_until_ready(kernel(*inputs))
    except Exception as error:
      _raise_cause(case, options, watch, error)
    race = watch.race() if case.detect_races else None
  if race is not None:
    _raise_race(case, options, race)
  compare(got, want, rtol=case.rtol, atol=case.atol)


def _trace(options: Options) -> contextlib.AbstractContextManager[Any]:
  """Returns the context in which events are recorded, if that was asked for."""
  if not options.trace:
    return contextlib.nullcontext()
  try:
    context = running.trace(options.trace)
    context.__enter__()
  except (ImportError, errors.UsageError) as error:
    raise StageFailed(texts.text_of(error)) from error
  stack = contextlib.ExitStack()
  stack.push(context)
  return stack


def _raise_cause(
    case, options: Options, watch: check_interpreter.Watch, error: Exception
):
  """Turns an exception of an interpreted kernel into the stage's answer."""
  cause = watch.cause(error)
  if (report := watch.report(error)) is not None:
    check_reports.raise_hang(case, options, report)
  if "Only interpret mode is supported on CPU" in texts.text_of(cause):
    raise StageFailed(
        "the factory does not pass its interpret= on to plgpu.kernel"
    ) from error
  race = watch.race(cause) if case.detect_races else None
  if race is not None:
    _raise_race(case, options, race)
  reason = check_interpreter.unsupported(cause)
  if reason is not None:
    raise StageSkipped(
        f"the GPU interpreter of JAX {jax.__version__} cannot run it: {reason}",
        clean=cause is error,
    ) from error
  place = check_interpreter.place_of(cause.__traceback__)
  if cause is error or place is None:
    raise cause
  raise StageFailed(
      f"{type(cause).__name__}: {texts.text_of(cause).strip()}",
      f"at {place}",
  ) from error


def _raise_race(case: KernelCase, options: Options, race: str):
  """Fails the stage with a race, and with a hang that it may have hidden.

  A race ends the kernel, or not, before it hangs, as the threads happen to run;
  without race detection a hang is found each time.
  """
  summary = check_interpreter.summarize_race(race)
  kernel = make_kernel(case, check_interpreter.parameters(detect_races=False))
  with check_interpreter.Watch() as watch:
    try:
      jax.block_until_ready(kernel(*make_inputs(case)))
    except Exception as error:  # pylint: disable=broad-exception-caught
      if (report := watch.report(error)) is not None:
        check_reports.raise_hang(case, options, report, also=summary)
  check_reports.raise_race(case, options, summary, race)


def make_inputs(case: KernelCase) -> tuple[Any, ...]:
  """Returns the kernel's arguments, the same for each run of the same case."""
  rng = np.random.default_rng(zlib.crc32(case.name.encode()))
  return case.make_inputs(rng)


def make_kernel(case: KernelCase, interpret: Any) -> Callable[..., Any]:  # pylint: disable=redefined-outer-name
  """Returns a fresh kernel, for the GPU or for the interpreter.

  Raises:
    StageFailed: The factory returns something else.
  """
  try:
    kernel = case.make_kernel(interpret)
  except TypeError as error:
    if "unexpected keyword argument 'interpret'" in texts.text_of(error):
      raise StageFailed(
          "the factory must take interpret=None, and pass it on to plgpu.kernel"
      ) from error
    raise
  if not callable(kernel):
    raise StageFailed(
        f"the factory must return a callable, it returned {kernel!r}"
    )
  return kernel


def compare(got: Any, want: Any, *, rtol: float, atol: float) -> None:
  """Compares what a kernel returned with what its reference did.

  Floating-point values are compared in the kernel's type, so a reference may
  compute in a wider one. NaNs are equal to each other.

  Args:
    got: A tree of arrays, from the kernel.
    want: A tree of as many arrays, from the reference.
    rtol: Relative tolerance.
    atol: Absolute tolerance.

  Raises:
    StageFailed: If an array has another shape, kind of type, or value.
  """
  got_leaves = jax.tree_util.tree_flatten_with_path(got)[0]
  want_leaves = jax.tree.leaves(want)
  if len(got_leaves) != len(want_leaves):
    raise StageFailed(
        f"the kernel returned {len(got_leaves)} arrays, the reference"
        f" {len(want_leaves)}"
    )
  for (path, got_leaf), want_leaf in zip(got_leaves, want_leaves):
    where = "output" + jax.tree_util.keystr(path)
    _compare_arrays(
        where, np.asarray(got_leaf), np.asarray(want_leaf), rtol, atol
    )


def _compare_arrays(
    where: str, got: np.ndarray, want: np.ndarray, rtol: float, atol: float
) -> None:
  if got.shape != want.shape:
    raise StageFailed(
        f"{where}: shape {got.shape}, the reference has {want.shape}"
    )
  kind = _kind(got.dtype)
  if kind != _kind(want.dtype):
    raise StageFailed(
        f"{where}: type {got.dtype}, the reference has {want.dtype}"
    )
  wide = np.complex128 if kind is np.complexfloating else np.float64
  if kind in (np.floating, np.complexfloating):
    got, want = got.astype(wide), want.astype(got.dtype).astype(wide)
  with np.errstate(all="ignore"):
    equal = (got == want) | ((got != got) & (want != want))
    error = np.abs(got.astype(wide) - want.astype(wide))
    if rtol or atol:
      # An infinite value is close to nothing but itself.
      equal |= np.isfinite(want) & (error <= atol + rtol * np.abs(want))
  if equal.all():
    return
  # Where they are equal is not asked; a NaN is as wrong as can be.
  error = np.where(equal, -1, np.where(np.isnan(error), np.inf, error))
  lines = []
  for what, at in (("first", np.argmin(equal)), ("worst", np.argmax(error))):
    index = np.unravel_index(at, got.shape)
    lines.append(
        f"{what} at {tuple(map(int, index))}: got {got[index]}, expected"
        f" {want[index]}"
    )
  raise StageFailed(
      f"wrong value: {where}: {np.count_nonzero(~equal)} of {got.size} values"
      " differ from the reference",
      "\n".join([*lines, f"rtol={rtol}, atol={atol}"]),
      data=dict(failure="wrong value"),
  )


def _kind(dtype: Any) -> Any:
  """Returns the kind of a type; NumPy alone does not know bfloat16's."""
  for kind in (np.bool_, np.integer, np.floating, np.complexfloating):
    if jnp.issubdtype(dtype, kind):
      return kind
  return dtype
