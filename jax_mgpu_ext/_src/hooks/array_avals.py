"""Says clearly what is not an array: `get_array_aval`, and output types."""

from __future__ import annotations

import functools
import sys
from typing import Any

from jax_mgpu_ext._src import aval_table
from jax_mgpu_ext._src import avals
from jax_mgpu_ext._src import errors
from jax_mgpu_ext._src import spec_text
from jax_mgpu_ext._src.hooks import contract

_METHODS = {
    "Barrier": aval_table.BARRIER_WORDS,
    "ClusterBarrier": aval_table.CLUSTER_BARRIER_WORDS,
    # JAX has no such method.
    "WGMMAAccumulatorRef": aval_table.ACCUMULATOR_WORDS,
}


def check_out_types(tree: Any, root: str) -> None:
  """Checks that every leaf of an output tree can be an output.

  Args:
    tree: What `out_type` or `out_shape` was given.
    root: Its name in error messages.

  Raises:
    SpecError: A leaf describes no array, or one that does not live in GMEM.
  """
  avals.check_specs(_check_out_type, tree, root)


def _check_out_type(leaf: Any) -> None:
  core = sys.modules[contract.MOSAIC_CORE]
  if isinstance(leaf, core.GPUMemoryRef):
    if leaf.memory_space != core.GMEM:
      raise errors.SpecError(
          "expected an output in GMEM, got"
          f" {spec_text.describe(leaf)}",
          code="MGPU014", spec=leaf,
          hint=(
              "An out_type is what the caller gets: write"
              f" jax.ShapeDtypeStruct({leaf.shape}, jnp.{leaf.dtype}); what"
              " only the kernel sees goes into scratch_types"
          ),
      )
  elif not avals.is_array_spec(leaf):
    # Says what is wrong with a barrier, a class or a number. What JAX converts
    # in its own ways, as the semaphores of the TPU backend, passes.
    avals.array_aval(leaf)


def _wrap_kernel(original):
  @functools.wraps(original)
  def kernel(*args, **kwargs):
    # `out_shape` is the keyword up to 0.11.1, where it is the second position.
    given = dict(zip(("body", "out_shape"), args)) | kwargs
    for name in ("out_type", "out_shape"):
      if name in given and not contract.is_not_specified(given[name]):
        check_out_types(given[name], name)
    return original(*args, **kwargs)

  return kernel


def _wrap_mpmd_map(original):
  @functools.wraps(original)
  def _mpmd_map(meshes_and_fns, /, out_types=(), **kwargs):
    check_out_types(out_types, "out_type")
    return original(meshes_and_fns, out_types, **kwargs)

  return _mpmd_map


def _wrap_pallas_call(original):
  @functools.wraps(original)
  def pallas_call(*args, **kwargs):
    # Positional or named, as the original takes it; it complains by itself
    # about a call without one.
    out_shape = args[1] if len(args) > 1 else kwargs.get("out_shape")
    check_out_types(out_shape, "out_shape")
    return original(*args, **kwargs)

  return pallas_call


def _apply(ledger) -> None:
  core = sys.modules[contract.MOSAIC_CORE]
  for name, words in _METHODS.items():
    ledger.set_attr(
        getattr(core, name),
        "get_array_aval",
        _method(aval_table.refuse_array(*words)),
    )
  ledger.replace(contract.KERNEL, _wrap_kernel)
  ledger.replace(contract.MPMD_MAP, _wrap_mpmd_map)
  ledger.replace(contract.PALLAS_CALL, _wrap_pallas_call)


def _method(refuse):
  def get_array_aval(self):
    return refuse(self)

  return get_array_aval


HOOK = contract.Hook(
    slug="array_avals",
    why=(
        "Barriers, accumulators and specs outside GMEM are refused as arrays"
        " and outputs in one way, with the place and the remedy"
    ),
    codes=("MGPU010", "MGPU011", "MGPU012", "MGPU013", "MGPU014"),
    targets=(
        *(
            contract.Target(
                module=contract.MOSAIC_CORE, name=f"{name}.get_array_aval"
            )
            for name in _METHODS
        ),
        contract.KERNEL,
        contract.MPMD_MAP,
        contract.PALLAS_CALL,
    ),
    apply=_apply,
    native=contract.Target(
        module=contract.PALLAS_CORE, name="convert_out_shapes_to_avals"
    ),
)
