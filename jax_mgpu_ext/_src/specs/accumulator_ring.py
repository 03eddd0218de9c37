"""A ring of accumulators in TMEM between the tensor core and its readers."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from jax_mgpu_ext._src import composites
from jax_mgpu_ext._src import errors
from jax_mgpu_ext._src import spec_text
from jax_mgpu_ext._src.specs import barriers
from jax_mgpu_ext._src.specs import composite
from jax_mgpu_ext._src.specs import ring_buffer
from jax_mgpu_ext._src.specs import steps

# PTX ISA, "Tensor Memory Addressing": 128 lanes of 512 columns of 32 bits.
_LANES = 128
_COLUMNS = 512


@composite.composite(
    "stages", "full", "empty", trees=("acc",),
    generated=("__eq__", "__hash__"),
)
@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class AccumulatorRing:
  """Accumulators that one warp's tcgen05 MMAs fill, and an epilogue drains.

  Step s, that is, output tile s, uses accumulator s % num_stages:

    TMEM columns  0 ............ N ............ 2N           (num_stages = 2)
                  | accumulator 0 | accumulator 1 |
    step              0, 2, 4, ...    1, 3, 5, ...
    producer      first lap: all are free; later: waits for `empty`, the release
                  by the epilogue, num_stages steps ago

  While the epilogue stores one tile, the tensor core computes the next. Each
  accumulator goes round these states; each barrier has one element for each:

    state     who acts, and how                          completes
    free      producer: producer_acquire(step)           -
    filling   producer: plgpu.tcgen05_mma(stage(step),   full: the tensor core
              ...), as often as there is to add up,      has done all MMAs that
              then producer_commit(step)                 were issued before
    ready     consumer: consumer_wait(step)              -
    reading   consumer: plgpu.async_load_tmem, then      empty: every consumer,
              consumer_release(step)                     of both blocks in
                                                         two-CTA mode, is done

  All threads count the same steps 0, 1, ..., num_steps - 1. The producer, one
  warp, goes through acquire, MMAs and commit for each, and calls
  `producer_tail(num_steps)` at the end; a consumer, a warpgroup, goes through
  wait, loads and release for each.

  In two-CTA mode each of the two blocks has half of the rows. The producer of
  the first block, the leader, issues MMAs and commits for both; that of the
  other block does not, but acquires and calls `producer_tail` all the same,
  since its barriers complete, too. The consumers of each block drain their own
  half.

  In a kernel the object that the body gets has the same class, with refs as
  `stages`, `full` and `empty`; `acc` stays as it was, `stage(step)` gives a ref.

  Attributes:
    acc: `plgpu.TMEM((128, N), jnp.float32)` of one accumulator, with
      `collective=True` in two-CTA mode.
    num_stages: Accumulators, 1 to 32.
    num_consumers: Threads (warpgroups) of a block that each read every
      accumulator, or a part of it, 1 to 8.
    collective_axis: The cluster axis of two blocks in two-CTA mode; None for
      one.
    stages: All accumulators, `(128, num_stages * N)`, of at most 512 columns; in
      the kernel a ref.
    full: Barriers of the block, one for each accumulator.
    empty: Barriers of the block, or of the two, one for each accumulator.
  """

  acc: Any = dataclasses.field(kw_only=False)
  num_stages: int = dataclasses.field(default=2, kw_only=False)
  num_consumers: int = 1
  collective_axis: Any = None
  stages: Any = dataclasses.field(default=None, init=False)
  full: Any = dataclasses.field(default=None, init=False)
  empty: Any = dataclasses.field(default=None, init=False)

  def __post_init__(self):
    put = lambda name, value: object.__setattr__(self, name, value)
    for name, most in (
        ("num_stages", None), ("num_consumers", composite.MAX_WARPGROUPS)
    ):
      value = getattr(self, name)
      put(name, composite.count(name, value, 1, "AccumulatorRing", most))
    if self.num_stages > ring_buffer.MAX_STAGES:
      raise errors.SpecError(
          f"num_stages must be at most {ring_buffer.MAX_STAGES}, since Mosaic"
          " keeps the phases of a barrier array in 32 bits, got"
          f" num_stages={spec_text.describe(self.num_stages)} in"
          " AccumulatorRing",
          code="MGPU121", hint="Make the accumulators wider, and fewer",
      )
    _check_accumulator(self.acc, self.collective_axis)
    columns = self.acc.shape[1]
    if columns * self.num_stages > _COLUMNS:
      fitting = _COLUMNS // columns
      raise errors.SpecError(
          f"num_stages={self.num_stages} accumulators of {columns} columns take"
          f" {columns * self.num_stages} columns of TMEM, which has {_COLUMNS},"
          " in AccumulatorRing",
          code="MGPU121", spec=self.acc, path="acc",
          hint=f"Write num_stages={fitting}, or a narrower accumulator"
          if fitting else f"Write an accumulator of {_COLUMNS} columns at most",
      )
    put(
        "stages",
        plgpu.TMEM(
            (_LANES, self.num_stages * columns),
            jnp.float32,
            collective=self.collective_axis is not None,
        ),
    )
    put(
        "full",
        plgpu.Barrier(
            num_arrivals=1,
            num_barriers=self.num_stages,
            orders_tensor_core=True,
        ),
    )
    axis = self.collective_axis
    put(
        "empty",
        barriers.MaybeClusterBarrier(
            collective_axes=None if axis is None else (axis,),
            num_arrivals=self.num_consumers,
            num_barriers=self.num_stages,
            orders_tensor_core=True,
        ),
    )

  def __repr__(self):
    shown = [f"{_LANES}x{self._columns}", f"num_stages={self.num_stages}"]
    if self.num_consumers != 1:
      shown.append(f"num_consumers={self.num_consumers}")
    if self.collective_axis is not None:
      shown.append(f"collective_axis={self.collective_axis!r}")
    return f"AccumulatorRing({', '.join(shown)})"

  @property
  def _columns(self) -> int:
    """Columns of one accumulator."""
    return self.acc.shape[1]

  def _check_mesh(self, mesh: composites.Mesh) -> None:
    """Checks that a kernel has the threads and blocks that the ring uses."""
    composite.check_threads(
        self, dict(num_consumers=self.num_consumers), mesh
    )
    axis = self.collective_axis
    if axis is None:
      return
    composite.check_axes(self, (axis,), mesh.axes)
    if mesh.axes[axis] != 2:
      raise errors.SpecError(
          f"two-CTA mode is for two blocks, got collective_axis={axis!r} of size"
          f" {mesh.axes[axis]} in AccumulatorRing",
          code="MGPU124", spec=self,
          hint="Pass cluster=(2,) to plgpu.kernel, with the rest of the blocks"
          " along other axes, or leave collective_axis out",
      )

  @composite.in_kernel
  def stage(self, step: Any) -> Any:
    """Returns the accumulator of a step, a TMEM ref of shape (128, N)."""
    first = self._index(step) * self._columns
    return self.stages.at[:, pl.ds(first, self._columns)]

  @composite.in_kernel
  def producer_acquire(self, step: Any) -> None:
    """Waits until the accumulator of a step is free; not in the first lap.

    Called by the producer, in two-CTA mode by those of both blocks, for each
    step in turn, before the first MMA of the step.

    Args:
      step: The step, from 0 on: an integer, or a traced one.
    """
    steps.wait_until_free(self.empty, step, self.num_stages)

  @composite.in_kernel
  def producer_commit(self, step: Any) -> None:
    """Hands the accumulator over, once the MMAs issued so far are done.

    Called by the producer, in two-CTA mode by the leader's alone, after the
    last MMA of the step; does not wait.

    Args:
      step: The step.
    """
    plgpu.tcgen05_commit_arrive(
        self.full.at[self._index(step)], collective_axis=self.collective_axis
    )

  @composite.in_kernel
  def consumer_wait(self, step: Any) -> Any:
    """Waits for the accumulator of a step, and returns its ref.

    Called by every consumer, for each step in turn.

    Args:
      step: The step.
    """
    plgpu.barrier_wait(self.full.at[self._index(step)])
    return self.stage(step)

  @composite.in_kernel
  def consumer_release(self, step: Any) -> None:
    """Waits for the consumer's loads from TMEM, and gives the accumulator back.

    Called by every consumer, for each step in turn, after its last load.

    Args:
      step: The step.
    """
    plgpu.wait_load_tmem()
    plgpu.barrier_arrive(self.empty.at[self._index(step)])

  @composite.in_kernel
  def producer_tail(self, num_steps: Any) -> None:
    """Waits until all accumulators are free again, at the end.

    Called by the producer, in two-CTA mode by those of both blocks, once.

    Args:
      num_steps: How many steps there were, 0 or more: an integer, or a traced
        one.
    """
    steps.wait_until_all_free(self.empty, num_steps, self.num_stages)

  def _index(self, step: Any) -> Any:
    return steps.index_of(step, self.num_stages)


def _check_accumulator(acc: Any, axis: Any) -> None:
  """Checks that the tensor core can write what was given.

  Raises:
    SpecError: It cannot; also a `TypeError`, if it is no ref in TMEM.
  """
  if axis is not None and not composite.is_axis_name(axis):
    raise errors.SpecTypeError(
        "collective_axis must be the name of one axis, got collective_axis="
        f"{spec_text.describe(axis)} in AccumulatorRing",
        code="MGPU121", hint='Write collective_axis="x"',
    )
  if isinstance(acc, plgpu.RefUnion) or (
      getattr(acc, "memory_space", None) != plgpu.TMEM
      or not hasattr(acc, "get_ref_aval")
      or not hasattr(acc, "layout")  # As a `pl.MemoryRef`.
  ):
    error = errors.SpecTypeError(
        "expected a memory ref in TMEM as the data of an AccumulatorRing, got"
        f" {spec_text.describe(acc)}",
        code="MGPU123", spec=acc,
        hint="Write plgpu.TMEM((128, columns), jnp.float32)",
    )
  elif len(acc.shape) != 2 or acc.shape[0] != _LANES or not acc.shape[1] or (
      acc.dtype != jnp.float32
      or acc.layout != plgpu.TMEM(acc.shape, acc.dtype).layout
  ):
    error = errors.SpecError(
        f"expected {_LANES} rows of float32, in TMEM's own layout, as the data"
        f" of an AccumulatorRing, got {spec_text.describe(acc)}",
        code="MGPU123", spec=acc,
        hint="Write plgpu.TMEM((128, columns), jnp.float32)",
    )
  elif bool(acc.collective) != (axis is not None):
    error = errors.SpecError(
        "collective_axis must be given with an accumulator that is collective,"
        f" and only then, got collective_axis={axis!r} and"
        f" collective={acc.collective} in AccumulatorRing",
        code="MGPU121", spec=acc,
        hint="Write plgpu.TMEM(..., collective=True) and"
        ' AccumulatorRing(..., collective_axis="x"), or neither',
    )
  else:
    return
  error.path = "acc"
  raise error
