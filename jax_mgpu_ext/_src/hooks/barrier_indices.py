"""Refuses static barrier indices that are outside of the barrier array.

JAX turns the index into an address as it is, negative ones too, and so the
kernel waits on memory that is no barrier.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from jax_mgpu_ext._src import errors
from jax_mgpu_ext._src.hooks import contract

_GETITEM = contract.Target(
    module="jax._src.state.types", name="RefIndexer.__getitem__"
)


def _check(ref: Any, indices: tuple[Any, ...]) -> None:
  """Checks what stands in the brackets of `ref.at[...]` of a barrier array.

  The indices are taken as they were written: JAX turns them into traced values.
  """
  shape = tuple(ref.shape)
  # The dimension of each index; those behind an ellipsis count from the end.
  dims = list(range(len(indices)))
  if (where := _ellipsis_at(indices)) is not None:
    hidden = len(shape) - len(indices)
    dims = [dim + hidden if dim > where else dim for dim in dims]
  for index, dim in zip(indices, dims):
    index = contract.as_integer(index)
    if index is not None and not 0 <= index < shape[dim]:
      raise errors.BarrierIndexError(
          f"barrier index {index} is out of range for dimension {dim} of a"
          f" barrier array of shape {shape} (num_barriers)",
          code="MGPU026", spec=ref,
          hint=(
              f"Legal are 0 to {shape[dim] - 1}; negative indices do not count"
              " from the end. In a ring, take the step modulo the number of"
              " stages"
          ),
      )


def _ellipsis_at(indices: tuple[Any, ...]) -> int | None:
  return next((i for i, index in enumerate(indices) if index is ...), None)


def _wrap_getitem(original):
  core = sys.modules[contract.MOSAIC_CORE]
  barrier_types = (core.BarrierType, core.ClusterBarrierType)

  @functools.wraps(original)
  def __getitem__(self, slc):
    view = original(self, slc)
    ref = self.ref_or_view
    if isinstance(getattr(ref, "dtype", None), barrier_types):
      _check(ref, slc if isinstance(slc, tuple) else (slc,))
    return view

  return __getitem__


HOOK = contract.Hook(
    slug="barrier_indices",
    why="A static barrier index out of range is refused when it is written",
    codes=("MGPU026",),
    targets=(
        _GETITEM,
        # Not changed, but needed: the hook tells barriers by their dtype.
        contract.Target(
            module=contract.MOSAIC_CORE, name="Barrier.get_ref_aval"
        ),
    ),
    apply=lambda ledger: ledger.replace(_GETITEM, _wrap_getitem),
)
