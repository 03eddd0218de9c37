"""What a target refuses, said before its compiler dies of it.

For a known target only: plain lowering on a machine without a GPU goes on
taking kernels for every GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
import functools
from typing import Any

from jax_mgpu_ext._src import budget_errors
from jax_mgpu_ext._src import budget_kernel
from jax_mgpu_ext._src import budget_rows
from jax_mgpu_ext._src import errors
from jax_mgpu_ext._src import kernel_calls
from jax_mgpu_ext._src import targets
from jax_mgpu_ext._src.targets import Target

# Primitives that become tcgen05 instructions, by their names in
# `jax._src.pallas.mosaic_gpu.primitives`, less the `_p` at their end.
TCGEN05 = (
    "tcgen05_mma",
    "tcgen05_commit_arrive",
    "commit_tmem",
    "async_load_tmem",
    "wait_load_tmem",
    "async_store_tmem",
    "async_copy_scales_to_tmem",
    "async_copy_sparse_metadata_to_tmem",
    "async_copy_smem_to_tmem",
)
# Those that become wgmma instructions.
WGMMA = (
    "wgmma_ref",
    "wgmma",
    "wgmma_wait",
    "wgmma_accumulator_deref",
    "wgmma_accumulator_store",
)
# What is said for the mesh, and for the sums; all else has a place in the body.
_OF_MESH = ("MGPU103", "MGPU104")
# Not MGPU105: accumulators that are too large for registers do compile, and spill.
_OF_SUMS = ("MGPU101", "MGPU102")


def refusals(
    call: Any, target: str | Target
) -> tuple[errors.SpecError, ...]:
  """Returns what of a kernel a target cannot do.

  First what the launch asks for (cluster, threads), then the body from top to
  bottom, each line of it once, then sums over the whole body (SMEM, TMEM).

  Not seen: what is inside of `plgpu.inline_mgpu`.

  Args:
    call: A kernel that `kernel_calls.find` has found, or a traced program,
      `jax.jit(f).trace(...)`, all of whose kernels are looked at.
    target: The GPU, or its name; see `targets.get`.

  Raises:
    TargetError: There is no such target.
  """
  target = targets.get(target)
  if isinstance(call, kernel_calls.KernelCall):
    return tuple(_refusals(call, target))
  return tuple(
      error
      for found in kernel_calls.find(call)
      for error in _refusals(found, target)
  )


def check(call: Any, target: str | Target) -> None:
  """Raises the first of `refusals`, if there is one.

  Args:
    call: As of `refusals`.
    target: As of `refusals`.

  Raises:
    SpecError: The target cannot do it.
    TargetError: There is no such target.
  """
  for error in refusals(call, target):
    raise error


def _refusals(
    call: kernel_calls.KernelCall, target: Target
) -> Iterator[errors.SpecError]:
  over = budget_kernel.budget_kernel(call, target).over
  yield from (error for error in over if error.code in _OF_MESH)
  seen = set()
  for equation in kernel_calls.walk(call.jaxpr, call.source):
    if kernel_calls.is_run_scoped(equation.eqn):
      found = _of_refs(equation, target)
    else:
      found = _of_primitive(equation, target)
    for error in found:
      if (error.code, error.problem, error.path) not in seen:
        seen.add((error.code, error.problem, error.path))
        yield error
  yield from (error for error in over if error.code in _OF_SUMS)


def _of_refs(
    equation: kernel_calls.Equation, target: Target
) -> Iterator[errors.SpecError]:
  refs = kernel_calls.allocations(equation.eqn, equation.source)
  for path, aval in refs:
    cost = budget_rows.cost_of_aval(aval)
    row = budget_rows.rows_of(path, aval, cost, None)[0]
    if cost.tmem_columns and not target.has_tcgen05:
      yield budget_errors.tmem_ref(row, target)
    if cost.orders_tensor_core and not target.has_tcgen05:
      yield budget_errors.tensor_core_barrier(row, target)
    if cost.kind == "accumulator" and not target.has_wgmma:
      yield budget_errors.accumulator_ref(row, target)


def _of_primitive(
    equation: kernel_calls.Equation, target: Target
) -> Iterator[errors.SpecError]:
  name, kind = primitives().get(equation.eqn.primitive, ("", ""))
  if kind == "tcgen05" and not target.has_tcgen05:
    hint = "Multiply with plgpu.wgmma" if target.has_wgmma else ""
    yield errors.SpecError(
        f"expected no tcgen05 instructions on {budget_errors.shown(target)},"
        f" got {name}",
        code="MGPU106", path=equation.source,
        hint=hint or "Compile for a GPU that has them, as b200",
    )
  if kind == "wgmma" and not target.has_wgmma:
    hint = "Multiply with plgpu.tcgen05_mma" if target.has_tcgen05 else ""
    yield errors.SpecError(
        f"expected no wgmma instructions on {budget_errors.shown(target)}, got"
        f" {name}: only compute capability 9.0 has them",
        code="MGPU107", path=equation.source,
        hint=hint or "Compile for a GPU that has them, as h100",
    )


@functools.cache
def primitives() -> dict[Any, tuple[str, str]]:
  """Returns primitive -> (its name in the tables, "tcgen05" or "wgmma").

  Primitives that this release of JAX does not have are left out.
  """
  from jax._src import core as jax_core  # pylint: disable=g-import-not-at-top
  from jax._src.pallas.mosaic_gpu import primitives as own  # pylint: disable=g-import-not-at-top

  found = {}
  for kind, names in (("tcgen05", TCGEN05), ("wgmma", WGMMA)):
    for name in names:
      for attribute in (f"{name}_p", name):
        primitive = getattr(own, attribute, None)
        if isinstance(primitive, jax_core.Primitive):
          found[primitive] = (name, kind)
  return found
