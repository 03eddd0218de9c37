"""A ring of stages in SMEM between producers and consumers."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_mgpu_ext._src import errors
from jax_mgpu_ext._src import spec_text
from jax_mgpu_ext._src.specs import barriers
from jax_mgpu_ext._src.specs import composite
from jax_mgpu_ext._src.specs import steps

# Mosaic keeps the phases of one barrier array in the bits of an int32.
MAX_STAGES = 32
_READS = ("async", "generic", "tcgen05")


@composite.composite("data", "full", "empty")
@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class RingBuffer:
  """Stages of SMEM that producers fill and consumers drain, in turn.

  Step s uses stage s % num_stages:

    step       0     1     2     3     4     5    ...     (num_stages = 3)
    stage      0     1     2     0     1     2
    producer   first lap: all     waits for `empty`: the release of the stage
               stages are free    by every consumer, num_stages steps ago

  Each stage goes round these states; each barrier has one element a stage:

    state     who acts, and how                          completes
    free      producer: producer_acquire(step)           -
    filling   producer: copy_in(src, step=step), or      full: all transfers of
              stores, then producer_commit(step)         all producers are there
    ready     consumer: consumer_wait(step)              -
    reading   consumer: consumer_release(step)           empty: every consumer, in
                                                         every block that the
                                                         data comes from or goes
                                                         to, has given it back

  With `leader_tracked`, two blocks share one MMA, which the consumer of the
  first block, the leader, issues for both: the producer of each fills its half
  of a stage, the leader's `full` completes when both halves are there, and its
  `consumer_release` frees the stage in both. The other block has no consumer.

  All threads count the same steps 0, 1, ..., num_steps - 1. A producer goes
  through acquire and fill for each, and calls `producer_tail(num_steps)` at the
  end; a consumer goes through wait, read and release for each. Then every
  completion is waited for once, none is passed over, and no block leaves while
  something arrives at it.

  In a kernel the object that the body gets has the same class, with refs in place
  of the specs.

  Attributes:
    data: A memory ref of one stage, or a tree of them (any shape); in the spec
      and in the kernel with a leading dimension of `num_stages`.
    num_stages: Stages, 1 to 32.
    num_producers: Threads (warpgroups) of a block that fill each stage together.
    num_consumers: Threads (warpgroups) of a block that each read every stage.
    collective_axes: Cluster axes along which `copy_in` multicasts: None for
      none, a name or a tuple of names for all of `data`, or a mapping like `data`
      with one of these for each ref.
    transfers_per_stage: Copies that each producer starts for each ref of a stage;
      0: none, it is filled by ordinary stores and `producer_commit`.
    consumer_reads: "async": consumers read by wgmma, tcgen05 or TMA, and have
      waited for that before they release; "generic": by ordinary loads, after
      which `consumer_release` orders them before the next copy; "tcgen05": by
      tcgen05 alone, and the tensor core itself gives the stage back, once it
      has done what was issued before `consumer_release`, which does not wait.
    leader_tracked: For `consumer_reads="tcgen05"`, how the two blocks of a
      collective MMA share the data, in the form of `collective_axes`, each a
      `plgpu.CopyPartition`: with `PARTITIONED(axis)`, `copy_in` gets the tile
      of both, and each block its half along that axis. The `collective_axes`
      are then the one axis of the MMA. None: each block has its own MMA.
    full: Barriers of the block, one for each stage.
    empty: Barriers of the block, or of the cluster, one for each stage.
  """

  data: Any = dataclasses.field(kw_only=False)
  num_stages: int = dataclasses.field(kw_only=False)
  num_producers: int = 1
  num_consumers: int = 1
  collective_axes: Any = None
  transfers_per_stage: int = 1
  consumer_reads: str = "async"
  leader_tracked: Any = None
  full: Any = dataclasses.field(default=None, init=False)
  empty: Any = dataclasses.field(default=None, init=False)
  _structure: Any = dataclasses.field(default=None, init=False)

  def __post_init__(self):
    put = lambda name, value: object.__setattr__(self, name, value)
    for name, least in (
        ("num_stages", 1), ("num_producers", 1), ("num_consumers", 1),
        ("transfers_per_stage", 0),
    ):
      put(name, composite.count(name, getattr(self, name), least, "RingBuffer"))
    if self.num_stages > MAX_STAGES:
      raise errors.SpecError(
          f"num_stages must be at most {MAX_STAGES}, since Mosaic keeps the"
          " phases of a barrier array in 32 bits, got"
          f" num_stages={self.num_stages} in RingBuffer",
          code="MGPU121", hint="Make the stages larger, and fewer",
      )
    if self.consumer_reads not in _READS:
      raise errors.SpecError(
          f"consumer_reads must be one of {', '.join(_READS)}, got"
          f" consumer_reads={spec_text.describe(self.consumer_reads)} in"
          " RingBuffer",
          code="MGPU121",
          hint='Write "generic" if consumers read by ordinary loads',
      )
    leaves, structure = jax.tree.flatten(self.data)
    if not leaves:
      raise errors.SpecError(
          "expected at least one memory ref as the data of a RingBuffer, got"
          f" data={spec_text.describe(self.data)}",
          code="MGPU123", hint="Write RingBuffer(plgpu.SMEM(shape, dtype), 3)",
      )
    stages = []
    for index, leaf in enumerate(leaves):
      try:
        stages.append(_stages(leaf, self.num_stages))
      except errors.SpecError as e:
        spec_text.attach_path_at(e, self.data, index, "data")
        raise
    axes = tuple(
        () if a is None else tuple(a) if isinstance(a, (tuple, list)) else (a,)
        for a in _of_leaves("collective_axes", self.collective_axes, structure)
    )
    for of_leaf in axes:
      if len({*of_leaf}) < len(of_leaf):
        raise errors.SpecError(
            "collective_axes must name each axis once, got"
            f" collective_axes={of_leaf} in RingBuffer",
            code="MGPU024",
            hint=f"Write collective_axes={tuple(dict.fromkeys(of_leaf))}",
        )
    tracked = _of_leaves("leader_tracked", self.leader_tracked, structure)
    if self.consumer_reads == "tcgen05" or tracked.count(None) < len(tracked):
      _check_leader(axes, tracked, self.consumer_reads)
    put("data", structure.unflatten(stages))
    put("collective_axes", axes)
    put("leader_tracked", tracked)
    put("_structure", structure)
    arrivals = self.transfers_per_stage * len(leaves) or 1
    put(
        "full",
        plgpu.Barrier(
            num_arrivals=self.num_producers * arrivals,
            num_barriers=self.num_stages,
        ),
    )
    together = tuple(dict.fromkeys(a for of_leaf in axes for a in of_leaf))
    by_tensor_core = self.consumer_reads == "tcgen05"
    put(
        "empty",
        barriers.MaybeClusterBarrier(
            # The tensor core itself arrives in both blocks.
            collective_axes=() if by_tensor_core else together,
            num_arrivals=self.num_consumers,
            num_barriers=self.num_stages,
            orders_tensor_core=by_tensor_core,
        ),
    )

  def __repr__(self):
    shown = [spec_text.describe(self.data), f"num_stages={self.num_stages}"]
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if field.name in ("num_producers", "num_consumers", "transfers_per_stage",
                        "consumer_reads") and value != field.default:
        shown.append(f"{field.name}={value!r}")
    for name in ("collective_axes", "leader_tracked"):
      if any(getattr(self, name)):
        shown.append(f"{name}={getattr(self, name)}")
    return f"RingBuffer({', '.join(shown)})"

  def check_mesh(self, num_threads: int) -> None:
    """Checks that a kernel has the threads that use the ring.

    Args:
      num_threads: Threads (warpgroups) of a block.

    Raises:
      SpecError: It has fewer.
    """
    for name in ("num_producers", "num_consumers"):
      wanted = getattr(self, name)
      if wanted > num_threads:
        raise errors.SpecError(
            f"a ring with {name}={wanted} needs as many threads (warpgroups), got"
            f" num_threads={num_threads}: it would wait for ever",
            code="MGPU124", spec=self,
            hint=f"Pass num_threads={wanted + 1} or more to plgpu.kernel",
        )

  def stage(self, step: Any) -> Any:
    """Returns the refs of the stage of a step, in the form of `data`."""
    index = self._index(step)
    refs = self._structure.flatten_up_to(self.data)
    return self._structure.unflatten([ref.at[index] for ref in refs])

  def producer_acquire(self, step: Any) -> None:
    """Waits until the stage of a step is free; the first lap does not wait.

    Called by every producer, for each step in turn, before it fills the stage.

    Args:
      step: The step, from 0 on: an integer, or a traced one.
    """
    steps.wait_until_free(self.empty, step, self.num_stages)

  def copy_in(self, src: Any, *, step: Any, **options: Any) -> None:
    """Starts the copies from GMEM into the stage of a step.

    They arrive on `full` by themselves. Called by every producer, after
    `producer_acquire`, as often a step as `transfers_per_stage` says.

    Args:
      src: A ref, or a tree like `data`, in GMEM, each of the shape of one
        stage, or where it is partitioned, of those of both blocks together.
      step: The step.
      **options: For `plgpu.copy_gmem_to_smem`.

    Raises:
      SpecError: The ring has no transfers.
    """
    if not self.transfers_per_stage:
      raise errors.SpecError(
          "copy_in is for rings with transfers_per_stage=1 or more, got 0 in"
          " RingBuffer",
          code="MGPU125", hint="Leave transfers_per_stage out, or store into"
          " stage(step) and call producer_commit(step)",
      )
    index = self._index(step)
    refs = self._structure.flatten_up_to(self.data)
    sources = self._structure.flatten_up_to(src)
    for source, ref, axes, tracked in zip(
        sources, refs, self.collective_axes, self.leader_tracked
    ):
      collective = {}
      if axes:
        collective["collective_axes"] = axes[0] if len(axes) == 1 else axes
      if tracked is not None:
        collective["leader_tracked"] = tracked
      plgpu.copy_gmem_to_smem(
          source, ref.at[index], self.full.at[index], **collective, **options
      )

  def producer_commit(self, step: Any) -> None:
    """Hands over a stage that was filled by ordinary stores.

    Called by every producer of a ring with `transfers_per_stage=0`, after its
    stores.

    Args:
      step: The step.
    """
    if self.transfers_per_stage:
      raise errors.SpecError(
          "producer_commit is for rings with transfers_per_stage=0, got"
          f" {self.transfers_per_stage} in RingBuffer",
          code="MGPU125", hint="Leave producer_commit out: copies arrive by"
          " themselves. For ordinary stores write transfers_per_stage=0",
      )
    if self._touched_by_async:
      plgpu.commit_smem()
    plgpu.barrier_arrive(self.full.at[self._index(step)])

  def consumer_wait(self, step: Any) -> Any:
    """Waits for the data of a step, and returns the refs of its stage.

    Called by every consumer, for each step in turn.

    Args:
      step: The step.
    """
    plgpu.barrier_wait(self.full.at[self._index(step)])
    return self.stage(step)

  def consumer_release(self, step: Any) -> None:
    """Gives the stage of a step back.

    Called by every consumer, for each step in turn, after it has read the stage:
    with `consumer_reads="async"`, after it has waited for what reads it; with
    "tcgen05", after it has issued what reads it, by one warp.

    Args:
      step: The step.
    """
    empty = self.empty.at[self._index(step)]
    if self.consumer_reads == "tcgen05":
      axis = next((a[0] for a in self.collective_axes if a), None)
      plgpu.tcgen05_commit_arrive(empty, collective_axis=axis)
      return
    if self.consumer_reads == "generic" and self._touched_by_async:
      # Orders the loads of all threads of the warpgroup before the next copy.
      plgpu.commit_smem()
    plgpu.barrier_arrive(empty)

  def producer_tail(self, num_steps: Any) -> None:
    """Waits until all stages are free again, at the end.

    Called by every producer, once, after its last step.

    Args:
      num_steps: How many steps there were, 0 or more: an integer, or a traced
        one.
    """
    steps.wait_until_all_free(self.empty, num_steps, self.num_stages)

  @property
  def _touched_by_async(self) -> bool:
    """Whether copies or tensor cores touch the stages, besides ld and st.

    Also in a cluster: one CUDA thread arrives for its warpgroup at the barriers
    of the peers, and `commit_smem` brings the warpgroup together before.
    """
    return (
        self.transfers_per_stage > 0
        or self.consumer_reads != "generic"
        or any(self.collective_axes)
    )

  def _index(self, step: Any) -> Any:
    return steps.index_of(step, self.num_stages)


def _stages(leaf: Any, num_stages: int) -> Any:
  """Returns the memory ref of all stages, or raises a SpecError."""
  if isinstance(leaf, plgpu.RefUnion) or not (
      isinstance(getattr(leaf, "memory_space", None), plgpu.MemorySpace)
      and leaf.memory_space == plgpu.SMEM
      and hasattr(leaf, "get_ref_aval")
  ):
    raise errors.SpecTypeError(
        "expected a memory ref in SMEM as the data of a RingBuffer, got"
        f" {spec_text.describe(leaf)}",
        code="MGPU123", spec=leaf,
        hint="Write plgpu.SMEM(shape, dtype), or specs.TiledSMEM(shape, dtype)",
    )
  return plgpu.SMEM(
      (num_stages, *leaf.shape), leaf.dtype, transforms=leaf.transforms
  )


def _of_leaves(name: str, given: Any, structure: Any) -> tuple[Any, ...]:
  """Returns what an argument says of each ref of the data."""
  if not isinstance(given, Mapping):
    return (given,) * structure.num_leaves
  try:
    return tuple(structure.flatten_up_to(given))
  except ValueError as e:
    raise errors.SpecError(
        f"{name} as a mapping must have the keys of data, got"
        f" {name}={spec_text.describe(given)}",
        code="MGPU121",
        hint=f"Write the {name} of each ref, None for those without multicast",
    ) from e


def _check_leader(axes: Any, tracked: Any, consumer_reads: str) -> None:
  """Checks what tcgen05 can give back: the stages of one block, or of a pair.

  Raises:
    SpecError: Something else is shared.
  """
  shown = f"collective_axes={axes}, leader_tracked={tracked} in RingBuffer"
  if consumer_reads != "tcgen05":
    raise errors.SpecError(
        "leader_tracked needs consumer_reads='tcgen05', since only the leader's"
        f" collective MMA gives the stages of both blocks back, got {shown}",
        code="MGPU121", hint='Write consumer_reads="tcgen05"',
    )
  shared = {a for a, t in zip(axes, tracked) if a or t is not None}
  if len(shared) > 1 or any(len(a) != 1 for a in shared) or (
      shared and not all(isinstance(t, plgpu.CopyPartition) for t in tracked)
  ):
    raise errors.SpecError(
        "a ring with consumer_reads='tcgen05' must share all of its data along"
        f" the one axis of the collective MMA, or none of it, got {shown}",
        code="MGPU121",
        hint='Write collective_axes="x" and a plgpu.CopyPartition for each',
    )
