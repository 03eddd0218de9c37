"""Installs the extractor, and routes JAX's four extraction places through it.

JAX asks `spec.get_ref_aval()` or `get_array_aval()` in `pl.run_scoped`, in the
scratch shapes of a grid, in `mpmd_map`, and for output types. With this hook
the specs of Mosaic GPU and all registered types are answered by
`avals.ref_aval` and `avals.array_aval` there; every other leaf is left to JAX.
"""

from __future__ import annotations

import copy
import functools
import sys
from typing import Any

from jax_mgpu_ext._src import avals
from jax_mgpu_ext._src import errors
from jax_mgpu_ext._src import spec_text
from jax_mgpu_ext._src.hooks import contract

_INSTALLED = {
    "ref_aval_of": avals.ref_aval,
    "array_aval_of": avals.array_aval,
    "register_spec": avals.register_spec,
}


class _Answered:
  """Stands for a spec of a registered type, which JAX cannot ask by itself.

  Looks like the spec otherwise, since JAX rebuilds the user's containers with
  it, and their constructors may look at their fields.
  """

  def __init__(self, spec: Any, ref_aval: Any):
    self._spec = spec
    self._ref_aval = ref_aval

  def __getattr__(self, name: str) -> Any:
    return getattr(self._spec, name)

  def get_ref_aval(self) -> Any:
    return self._ref_aval


def answer_specs(tree: Any, root: str) -> Any:
  """Answers for the specs of a tree that are ours.

  Returns:
    The tree itself, or one with stand-ins where a type is registered.

  Raises:
    SpecError: A spec has no ref aval; carries the path under `root`.
  """

  def check(leaf):
    if avals.is_routed(leaf):
      avals.ref_aval(leaf)

  def answer(leaf):
    if avals.is_registered(leaf):
      return _Answered(leaf, avals.ref_aval(leaf))
    return leaf

  avals.check_specs(check, tree, root)
  if not any(map(avals.is_registered, avals.flatten(tree)[0])):
    return tree
  return avals.map_specs(answer, tree, root)


def _wrap_run_scoped(original):
  @functools.wraps(original)
  def run_scoped(f, *types, collective_axes=(), **kw_types):
    # One flattening for both, positional and named, as JAX does it.
    types, kw_types = _answer_arguments(types, kw_types)
    return original(f, *types, collective_axes=collective_axes, **kw_types)

  return run_scoped


def _answer_arguments(types, kw_types):
  return (
      answer_specs(types, "types") if types else types,
      answer_specs(kw_types, "types") if kw_types else kw_types,
  )


def _wrap_get_grid_mapping(original):
  @functools.wraps(original)
  def get_grid_mapping(grid_spec, *args, **kwargs):
    scratch = answer_specs(grid_spec.scratch_shapes, "scratch_shapes")
    if scratch is not grid_spec.scratch_shapes:
      # A copy, since the grid spec is the user's and may be used again.
      grid_spec = copy.copy(grid_spec)
      grid_spec.scratch_shapes = scratch
    return original(grid_spec, *args, **kwargs)

  return get_grid_mapping


def _wrap_aval_to_ref_aval(original):
  state = sys.modules["jax._src.state"]
  ref_types = (state.AbstractRef, state.TransformedRef)

  @functools.wraps(original)
  def _aval_to_ref_aval(aval, meshes):
    if isinstance(aval, ref_types) or not avals.is_routed(aval):
      return original(aval, meshes)
    ref_aval = avals.ref_aval(aval)
    if not isinstance(ref_aval, state.AbstractRef):
      raise errors.TransformedRefError(
          "expected a spec without transforms in the scratch_types of"
          f" pl.kernel, got {spec_text.describe(aval)}",
          code="MGPU005", spec=aval,
          hint=(
              "Allocate it with plgpu.kernel(scratch_types=...), or with"
              " pl.run_scoped in the kernel's body"
          ),
      )
    return ref_aval

  return _aval_to_ref_aval


def _wrap_convert_out_shape(original):
  semaphore_type = sys.modules[contract.MOSAIC_CORE].SemaphoreType

  @functools.wraps(original)
  def _convert_out_shape_to_aval(out_shape):
    # A semaphore has an array aval, but JAX refuses it as an output by itself.
    if avals.is_routed(out_shape) and not isinstance(out_shape, semaphore_type):
      return avals.array_aval(out_shape)
    return original(out_shape)

  return _convert_out_shape_to_aval


def _apply(ledger) -> None:
  for target, wrap in (
      (contract.RUN_SCOPED, _wrap_run_scoped),
      (contract.GRID_MAPPING, _wrap_get_grid_mapping),
      (contract.MPMD_LEAF, _wrap_aval_to_ref_aval),
      (contract.OUT_TYPE, _wrap_convert_out_shape),
  ):
    ledger.replace(target, wrap)
  core = sys.modules[contract.MOSAIC_CORE]
  for name, function in _INSTALLED.items():
    ledger.set_attr(core, name, function)


HOOK = contract.Hook(
    slug="aval_dispatch",
    why=(
        "One type-dispatching extractor answers for every spec, registered"
        " ones included, wherever JAX derives an aval"
    ),
    codes=("MGPU004", "MGPU005", "MGPU006", "MGPU080", "MGPU081"),
    targets=(
        contract.RUN_SCOPED,
        contract.GRID_MAPPING,
        contract.MPMD_LEAF,
        contract.OUT_TYPE,
        *(
            contract.Target(module=contract.MOSAIC_CORE, name=name)
            for name in _INSTALLED
        ),
    ),
    apply=_apply,
    native=contract.Target(
        module=contract.PALLAS_CORE, name="_spec_aval_rules"
    ),
)
