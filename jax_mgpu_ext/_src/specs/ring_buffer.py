"""A ring of stages in SMEM between producers and consumers."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_mgpu_ext._src import composites
from jax_mgpu_ext._src import errors
from jax_mgpu_ext._src import spec_text
from jax_mgpu_ext._src.specs import barriers
from jax_mgpu_ext._src.specs import composite
from jax_mgpu_ext._src.specs import ring_arguments
from jax_mgpu_ext._src.specs import steps

# Mosaic keeps the phases of one barrier array in the bits of an int32.
MAX_STAGES = 32
# PTX ISA, "Contents of the mbarrier object": pending arrivals, 1 to 2^20 - 1.
MAX_ARRIVALS = 2**20 - 1
_READS = ("async", "generic", "tcgen05")


@composite.composite(
    "stages", "full", "empty",
    trees=("data", "collective_axes", "leader_tracked"),
    generated=("__eq__", "__hash__"),
)
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

  In a kernel the object that the body gets has the same class, with refs as
  `stages`, `full` and `empty`; `data` stays as it was, `stage(step)` gives refs.

  Attributes:
    data: A memory ref of one stage, or a tree of them (any shape).
    num_stages: Stages, 1 to 32.
    num_producers: Threads (warpgroups) of a block that fill each stage together,
      1 to 8.
    num_consumers: Threads (warpgroups) of a block that each read every stage, 1
      to 8.
    collective_axes: Cluster axes along which `copy_in` multicasts: None for
      none, a name or a tuple of names for all of `data`, or a tree like `data`
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
    stages: `data` with a leading dimension of `num_stages`; in the kernel refs.
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
  stages: Any = dataclasses.field(default=None, init=False)
  full: Any = dataclasses.field(default=None, init=False)
  empty: Any = dataclasses.field(default=None, init=False)
  # What the arguments say of each leaf of the data.
  _axes: tuple[tuple[Any, ...], ...] = dataclasses.field(default=(), init=False)
  _tracked: tuple[Any, ...] = dataclasses.field(default=(), init=False)

  def __post_init__(self):
    put = lambda name, value: object.__setattr__(self, name, value)
    for name, least, most in (
        ("num_stages", 1, None), ("transfers_per_stage", 0, None),
        ("num_producers", 1, composite.MAX_WARPGROUPS),
        ("num_consumers", 1, composite.MAX_WARPGROUPS),
    ):
      value = getattr(self, name)
      put(name, composite.count(name, value, least, "RingBuffer", most))
    if self.num_stages > MAX_STAGES:
      raise errors.SpecError(
          f"num_stages must be at most {MAX_STAGES}, since Mosaic keeps the"
          " phases of a barrier array in 32 bits, got"
          f" num_stages={spec_text.describe(self.num_stages)} in RingBuffer",
          code="MGPU121", hint="Make the stages larger, and fewer",
      )
    if not (
        isinstance(self.consumer_reads, str) and self.consumer_reads in _READS
    ):
      raise errors.SpecError(
          f"consumer_reads must be one of {', '.join(_READS)}, got"
          f" consumer_reads={spec_text.describe(self.consumer_reads)} in"
          " RingBuffer",
          code="MGPU121",
          hint='Write "generic" if consumers read by ordinary loads',
      )
    leaves, structure = ring_arguments.flatten(self.data)
    stages = ring_arguments.stages(self.data, leaves, self.num_stages)
    axes = ring_arguments.collective_axes(self.collective_axes, structure)
    tracked = ring_arguments.leader_tracked(self.leader_tracked, structure)
    if self.consumer_reads == "tcgen05" or tracked.count(None) < len(tracked):
      ring_arguments.check_leader(axes, tracked, leaves, self.consumer_reads)
    put("data", structure.unflatten(leaves))  # The caller may change its own.
    put("stages", structure.unflatten(stages))
    put("collective_axes", ring_arguments.canonical(axes, structure))
    put("leader_tracked", ring_arguments.canonical(tracked, structure))
    put("_axes", axes)
    put("_tracked", tracked)
    arrivals = self.transfers_per_stage * len(leaves) or 1
    if self.num_producers * arrivals > MAX_ARRIVALS:
      raise errors.SpecError(
          f"num_producers * transfers_per_stage * {len(leaves)} refs are"
          f" {self.num_producers * arrivals} arrivals, more than the"
          f" {MAX_ARRIVALS} that a barrier counts, in RingBuffer",
          code="MGPU121",
          hint="transfers_per_stage counts copies of each ref, not bytes",
      )
    put(
        "full",
        plgpu.Barrier(
            num_arrivals=self.num_producers * arrivals,
            num_barriers=self.num_stages,
        ),
    )
    by_tensor_core = self.consumer_reads == "tcgen05"
    put(
        "empty",
        barriers.MaybeClusterBarrier(
            # The tensor core itself arrives in both blocks.
            collective_axes=(
                () if by_tensor_core else ring_arguments.barrier_axes(axes)
            ),
            num_arrivals=self.num_consumers,
            num_barriers=self.num_stages,
            orders_tensor_core=by_tensor_core,
        ),
    )

  def __repr__(self):
    shown = [spec_text.describe(self.data), f"num_stages={self.num_stages}"]
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if field.init and field.kw_only and value != field.default:
        shown.append(f"{field.name}={value!r}")
    return f"RingBuffer({', '.join(shown)})"

  def _check_mesh(self, mesh: composites.Mesh) -> None:
    """Checks that a kernel has the threads and the axes that the ring uses."""
    composite.check_threads(
        self,
        dict(num_producers=self.num_producers, num_consumers=self.num_consumers),
        mesh,
    )
    composite.check_axes(self, dict.fromkeys(sum(self._axes, ())), mesh.axes)

  @composite.in_kernel
  def stage(self, step: Any) -> Any:
    """Returns the refs of the stage of a step, in the form of `data`."""
    index = self._index(step)
    return jax.tree.map(lambda _, ref: ref.at[index], self.data, self.stages)

  @composite.in_kernel
  def producer_acquire(self, step: Any) -> None:
    """Waits until the stage of a step is free; the first lap does not wait.

    Called by every producer, for each step in turn, before it fills the stage.

    Args:
      step: The step, from 0 on: an integer, or a traced one.
    """
    steps.wait_until_free(self.empty, step, self.num_stages)

  @composite.in_kernel
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
    for name in ("barrier", "collective_axes", "leader_tracked"):
      if name in options:
        raise errors.SpecTypeError(
            f"copy_in of a RingBuffer takes no {name}, got"
            f" {name}={spec_text.describe(options[name])}",
            code="MGPU125", hint="Leave it out: the ring knows it",
        )
    structure = jax.tree.structure(self.data)
    try:
      sources = structure.flatten_up_to(src)
    except (TypeError, ValueError) as e:
      raise errors.SpecTypeError(
          "expected a tree of refs like data as the source of copy_in, got"
          f" {spec_text.describe(src)} for data={spec_text.describe(self.data)}:"
          f" {spec_text.describe_error(e).splitlines()[0]}",
          code="MGPU125", hint="Pass one ref in GMEM for each ref of data",
      ) from e
    refs = structure.flatten_up_to(self.stages)
    for number, (source, ref, axes, tracked) in enumerate(
        zip(sources, refs, self._axes, self._tracked)
    ):
      if source is None or isinstance(source, (dict, list, tuple)):
        raise errors.SpecTypeError(
            "expected a tree of refs like data as the source of copy_in, got"
            f" {spec_text.describe(source)} for one ref of"
            f" data={spec_text.describe(self.data)}",
            code="MGPU125", hint="Pass one ref in GMEM for each ref of data",
        )
      collective = {}
      if axes:
        collective["collective_axes"] = axes[0] if len(axes) == 1 else axes
      if tracked is not None:
        collective["leader_tracked"] = tracked
      try:
        plgpu.copy_gmem_to_smem(
            source, ref.at[index], self.full.at[index], **collective, **options
        )
      except (TypeError, ValueError) as e:
        error = errors.spec_error_like(type(e))(
            f"{spec_text.describe_error(e)}: copy_in got"
            f" {spec_text.describe(source)}",
            code="MGPU125",
            hint="Pass a part of GMEM of the shape and dtype of one stage",
        )
        spec_text.attach_path_at(error, self.data, number, "data")
        raise error from e

  @composite.in_kernel
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

  @composite.in_kernel
  def consumer_wait(self, step: Any) -> Any:
    """Waits for the data of a step, and returns the refs of its stage.

    Called by every consumer, for each step in turn.

    Args:
      step: The step.
    """
    plgpu.barrier_wait(self.full.at[self._index(step)])
    return self.stage(step)

  @composite.in_kernel
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
      axis = next((a[0] for a in self._axes if a), None)
      plgpu.tcgen05_commit_arrive(empty, collective_axis=axis)
      return
    if self.consumer_reads == "generic" and self._touched_by_async:
      # Orders the loads of all threads of the warpgroup before the next copy.
      plgpu.commit_smem()
    plgpu.barrier_arrive(empty)

  @composite.in_kernel
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
        or any(self._axes)
    )

  def _index(self, step: Any) -> Any:
    return steps.index_of(step, self.num_stages)
