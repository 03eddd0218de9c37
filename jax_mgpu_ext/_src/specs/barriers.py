"""Barriers that come in pairs, or that may span a cluster."""

from __future__ import annotations

from collections.abc import Sequence, Sized
import dataclasses
from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_mgpu_ext._src import avals
from jax_mgpu_ext._src import errors
from jax_mgpu_ext._src import spec_text
from jax_mgpu_ext._src.specs import composite


def MaybeClusterBarrier(  # pylint: disable=invalid-name
    *,
    collective_axes: Sequence[Any] | None = None,
    num_arrivals: int = 1,
    num_barriers: int | Sequence[int] = (),
    orders_tensor_core: bool = False,
):
  """Returns a barrier of the block, or one of the cluster.

  In a kernel both are used alike, so that one body serves both.

  Args:
    collective_axes: The cluster axes along which blocks arrive together; None,
      or no axes at all: a `plgpu.Barrier`.
    num_arrivals: Arrivals that complete a phase; of each block, in a cluster.
    num_barriers: Shape of the barrier array.
    orders_tensor_core: As of `plgpu.Barrier`.

  Raises:
    SpecError: As of the barrier that is made.
  """
  if collective_axes is None or (
      isinstance(collective_axes, Sized) and not len(collective_axes)
  ):
    return plgpu.Barrier(
        num_arrivals=num_arrivals,
        num_barriers=num_barriers,
        orders_tensor_core=orders_tensor_core,
    )
  return plgpu.ClusterBarrier(
      collective_axes=collective_axes,
      num_arrivals=num_arrivals,
      num_barriers=num_barriers,
      orders_tensor_core=orders_tensor_core,
  )


@composite.composite("full", "empty")
@dataclasses.dataclass(frozen=True, kw_only=True)
class BarrierPair:
  """The two barriers of a stage: data is ready, and the stage is free.

  Attributes:
    full: Completes when the data of a stage is there.
    empty: Completes when all consumers have given the stage back.

  Raises:
    SpecError: One is no barrier.
  """

  full: Any
  empty: Any

  def __post_init__(self):
    for name in ("full", "empty"):
      value = getattr(self, name)
      if not avals.is_barrier(value):
        raise errors.SpecTypeError(
            f"expected a barrier as {name} of a BarrierPair, got"
            f" {spec_text.describe(value)}",
            code="MGPU121", spec=value, path=name,
            hint="Write plgpu.Barrier(...), plgpu.ClusterBarrier(...) or"
            " specs.MaybeClusterBarrier(...)",
        )
