"""The answers of JAX's own spec types, as data.

This module imports no JAX at its top level, as `avals.py`.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

from jax_mgpu_ext._src import errors
from jax_mgpu_ext._src import spec_text


@dataclasses.dataclass(frozen=True)
class Entry:
  """The answers of one spec type.

  Attributes:
    ref_aval: Spec -> ref aval; raises `SpecError` if the spec has none.
    array_aval: Spec -> array aval; raises `SpecError` if the spec has none.
    cached: A spec is immutable, and so has one ref aval for all its life.
    is_array: Whether `array_aval` gives an answer.
    is_routed: Whether JAX's own extraction goes through the entry, hooks on.
    is_ref: Whether `ref_aval` gives an answer.
  """

  ref_aval: Callable[[Any], Any]
  array_aval: Callable[[Any], Any]
  cached: bool = False
  is_array: bool = True
  is_routed: bool = True
  is_ref: bool = True


@functools.cache
def builtin_entries() -> dict[type[Any], Entry]:
  """Returns the table of JAX's own types; imports Pallas Mosaic GPU."""
  # pylint: disable=g-import-not-at-top
  from jax._src import core as jax_core
  from jax._src import state
  from jax._src.pallas import core as pallas_core
  from jax._src.pallas.mosaic_gpu import core
  from jax._src.state import types as state_types
  # pylint: enable=g-import-not-at-top

  memory_ref = Entry(_own_ref_aval, _own_array_aval, cached=True)
  ref_only = dataclasses.replace(memory_ref, is_array=False)
  ref_aval = Entry(lambda aval: aval, convert_output, is_array=False)
  return {
      # Of the plain `MemoryRef`, which the TPU backend uses too, JAX keeps the
      # extraction; there is nothing in it to improve.
      pallas_core.MemoryRef: dataclasses.replace(memory_ref, is_routed=False),
      core.GPUMemoryRef: memory_ref,
      core.RefUnion: memory_ref,
      core.SemaphoreType: memory_ref,
      core.Barrier: dataclasses.replace(
          ref_only, array_aval=refuse_array(*BARRIER_WORDS)
      ),
      core.ClusterBarrier: dataclasses.replace(
          ref_only, array_aval=refuse_array(*CLUSTER_BARRIER_WORDS)
      ),
      core.WGMMAAccumulatorRef: dataclasses.replace(
          ref_only, array_aval=refuse_array(*ACCUMULATOR_WORDS)
      ),
      state.AbstractRef: ref_aval,
      state_types.TransformedRef: ref_aval,
      jax_core.ShapeDtypeStruct: ARRAY_ONLY,
      jax_core.ShapedArray: ARRAY_ONLY,
  }


@functools.cache
def ref_types() -> tuple[type[Any], ...]:
  """Returns the types of ref avals."""
  from jax._src import state  # pylint: disable=g-import-not-at-top

  return (state.AbstractRef, state.TransformedRef)


# What JAX says (or would say, for accumulators, where it has no method), the
# code, and the class of the error.
BARRIER_WORDS = ("Barriers are not arrays", "MGPU010", errors.NotAnArrayError)
CLUSTER_BARRIER_WORDS = (
    "Cluster barriers are not arrays", "MGPU011", errors.NotAnArrayError
)
ACCUMULATOR_WORDS = (
    "WGMMA accumulators are not arrays", "MGPU012", errors.NoArrayMethodError
)


def refuse_array(
    words: str, code: str, error: type[errors.SpecError]
) -> Callable[[Any], Any]:
  """Returns an extractor that says that a spec is not an array."""

  def refuse(spec):
    raise error(
        f"{words}: {spec_text.describe(spec)} describes a ref",
        code=code, spec=spec,
        hint=(
            "Use get_ref_aval() or jax_mgpu_ext.avals.ref_aval for its type,"
            " and allocate it in scratch_types or pl.run_scoped"
        ),
    )

  return refuse


def convert_output(spec: Any) -> Any:
  """Answers as JAX's own conversion of `out_type`, with hooks on or off."""
  from jax._src.pallas import core as pallas_core  # pylint: disable=g-import-not-at-top

  if isinstance(spec, type):
    raise spec_text.no_output_error(spec, "Invalid out_shape type")
  convert = pallas_core._convert_out_shape_to_aval  # pylint: disable=protected-access
  try:
    return getattr(convert, "__wrapped__", convert)(spec)
  except errors.SpecError:
    raise
  except ValueError as e:
    raise spec_text.no_output_error(spec, str(e)) from e


def _own_ref_aval(spec: Any) -> Any:
  return spec.get_ref_aval()


def _own_array_aval(spec: Any) -> Any:
  return spec.get_array_aval()


def _protocol_array_aval(spec: Any) -> Any:
  if hasattr(spec, "get_array_aval"):
    return spec.get_array_aval()
  return convert_output(spec)


def _unknown_ref_aval(spec: Any) -> Any:
  if not isinstance(spec, type):
    # A method of the instance, not of its type.
    get_ref_aval = spec_text.safe_getattr(spec, "get_ref_aval")
    if get_ref_aval is not None:
      return get_ref_aval()
  raise spec_text.no_spec_error(spec)


# Types that only describe arrays.
ARRAY_ONLY = Entry(
    _unknown_ref_aval, convert_output, is_routed=False, is_ref=False
)
# Types that follow Pallas' `ScratchShape` protocol, as those of the TPU
# backend and of other libraries.
PROTOCOL = Entry(_own_ref_aval, _protocol_array_aval, is_routed=False)
# All other types: what is no spec.
UNKNOWN = dataclasses.replace(ARRAY_ONLY, is_array=False)
