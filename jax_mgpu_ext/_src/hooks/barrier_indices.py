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


def _first_outside(
    indices: tuple[Any, ...], shape: tuple[int, ...]
) -> tuple[int, int] | None:
  """Returns the first static index that is out of range, and its dimension.

  The indices are taken as they were written: JAX turns them into traced values.
  """
  hidden = 0  # How many dimensions an ellipsis stands for, but for one.
  for position, index in enumerate(indices):
    if index is ...:
      hidden = len(shape) - len(indices)
    elif not isinstance(index, slice):
      index, dim = contract.as_integer(index), position + hidden
      # Sizes of other refs may be symbolic, or traced.
      if index is None or not isinstance(shape[dim], int):
        continue
      if not 0 <= index < shape[dim]:
        return index, dim
  return None


def _index_error(
    ref: Any, index: int, dim: int, shape: tuple[int, ...]
) -> errors.BarrierIndexError:
  return errors.BarrierIndexError(
      f"barrier index {index} is out of range for dimension {dim} of a barrier"
      f" array of shape {shape} (num_barriers)",
      code="MGPU026", spec=ref,
      hint=(
          f"Legal are 0 to {shape[dim] - 1}; negative indices do not count from"
          " the end. In a ring, take the step modulo the number of stages"
      ),
  )


def _wrap_getitem(original):
  core = sys.modules[contract.MOSAIC_CORE]
  barrier_types = (core.BarrierType, core.ClusterBarrierType)

  @functools.wraps(original)
  def __getitem__(self, slc):
    view = original(self, slc)
    # Every ref is indexed here, so the cheap question comes first: the dtype is
    # looked up only for an index that no barrier could have.
    shape = view.transforms[-1].shape
    outside = _first_outside(slc if isinstance(slc, tuple) else (slc,), shape)
    if outside is not None:
      ref = self.ref_or_view
      if isinstance(getattr(ref, "dtype", None), barrier_types):
        raise _index_error(ref, *outside, tuple(shape))
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
    native=contract.Target(
        module="jax._src.state.types", name="_check_static_indices"
    ),
)
