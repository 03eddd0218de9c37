"""What the arguments of a `RingBuffer` say of each ref of its data."""

from __future__ import annotations

import operator
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_mgpu_ext._src import errors
from jax_mgpu_ext._src import spec_text
from jax_mgpu_ext._src.specs import composite


def flatten(data: Any) -> tuple[list[Any], Any]:
  """Returns the memory refs of the data of a ring, and their structure.

  Raises:
    SpecError: There are none, or JAX cannot flatten the tree.
  """
  try:
    leaves, structure = jax.tree.flatten(data)
  except (RecursionError, SystemError, TypeError, ValueError) as e:
    # SystemError is what JAX makes of a tree that is too deep, or has no end.
    raise errors.SpecError(
        f"{spec_text.describe_error(e)}: data={spec_text.describe(data)} in"
        " RingBuffer is no pytree",
        code="MGPU123",
        hint="Write a dict with strings as keys, a list, or a tuple",
    ) from e
  if not leaves:
    raise errors.SpecError(
        "expected at least one memory ref as the data of a RingBuffer, got"
        f" data={spec_text.describe(data)}",
        code="MGPU123", hint="Write RingBuffer(plgpu.SMEM(shape, dtype), 3)",
    )
  return leaves, structure


def stages(data: Any, leaves: list[Any], num_stages: int) -> list[Any]:
  """Returns the memory refs of all stages.

  Raises:
    SpecError: A leaf is no memory ref in SMEM; carries its path.
  """
  found = []
  for leaf in leaves:
    try:
      found.append(_stages(leaf, num_stages))
    except errors.SpecError as e:
      spec_text.attach_path_at(e, data, len(found), "data")
      raise
  return found


def _stages(leaf: Any, num_stages: int) -> Any:
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
  if 0 in leaf.shape:
    raise errors.SpecError(
        "expected at least one element as the data of a RingBuffer, got"
        f" {spec_text.describe(leaf)}",
        code="MGPU123", spec=leaf, hint="Make every dimension 1 or more",
    )
  return plgpu.SMEM(
      (num_stages, *leaf.shape), leaf.dtype,
      # `pl.MemoryRef` has none.
      transforms=getattr(leaf, "transforms", ()),
  )


def collective_axes(given: Any, structure: Any) -> tuple[tuple[Any, ...], ...]:
  """Returns the cluster axes along which each ref of the data is multicast.

  Args:
    given: None, a name, or names, for all; or one of these for each ref.
    structure: That of the data.

  Raises:
    SpecError: It is none of these, or names an axis twice.
  """
  axes = _names(given)
  if axes is not None:
    of_leaves = [axes] * structure.num_leaves
  else:
    of_leaves = []
    for value in _of_leaves("collective_axes", given, structure):
      axes = _names(value)
      if axes is None:
        raise errors.SpecTypeError(
            "collective_axes of a ref must be one name or several, got"
            f" {spec_text.describe(value)} in"
            f" collective_axes={spec_text.describe(given)} of RingBuffer",
            code="MGPU121",
            hint='Write collective_axes="x", or ("x", "y"), or one of these for'
            " each ref in a tree like data",
        )
      of_leaves.append(axes)
  for axes in of_leaves:
    if len({*axes}) < len(axes):
      raise errors.SpecError(
          "collective_axes must name each axis once, got"
          f" collective_axes={axes} in RingBuffer",
          code="MGPU024",
          hint=f"Write collective_axes={tuple(dict.fromkeys(axes))}",
      )
  return tuple(of_leaves)


def leader_tracked(given: Any, structure: Any) -> tuple[Any, ...]:
  """Returns how two blocks share each ref of the data.

  Raises:
    SpecError: It is a tree, but not like the data.
  """
  if given is None or isinstance(given, plgpu.CopyPartition):
    return (given,) * structure.num_leaves
  return tuple(_of_leaves("leader_tracked", given, structure))


def barrier_axes(of_leaves: tuple[tuple[Any, ...], ...]) -> tuple[Any, ...]:
  """Returns the axes of the barrier at which all blocks of the multicasts arrive.

  A ref that is multicast along several axes goes to all blocks of their product,
  so these axes form one group of a `ClusterBarrier`. Groups with an axis in
  common become one, since the barrier counts each block of a group once for each
  group; then some blocks wait for more of the others than they had to.
  """
  groups: list[list[Any]] = []
  for axes in of_leaves:
    if not axes:
      continue
    merged = list(axes)
    for group in [g for g in groups if set(g) & set(axes)]:
      groups.remove(group)
      merged = [*group, *(axis for axis in merged if axis not in group)]
    groups.append(merged)
  return tuple(
      group[0] if len(group) == 1 else tuple(group) for group in groups
  )


def canonical(of_leaves: tuple[Any, ...], structure: Any) -> Any:
  """Returns one form of an argument for all refs, or for each of them.

  Given as that argument, it means the same again.
  """
  first = of_leaves[0]
  if any(value != first for value in of_leaves):
    return structure.unflatten(of_leaves)
  return None if first == () else first


def _names(value: Any) -> tuple[Any, ...] | None:
  """Returns names of axes as a tuple, or None if these are none."""
  if value is None:
    return ()
  if isinstance(value, (tuple, list)):
    return tuple(value) if all(map(composite.is_axis_name, value)) else None
  return (value,) if composite.is_axis_name(value) else None


def _of_leaves(name: str, given: Any, structure: Any) -> list[Any]:
  """Returns what an argument says of each ref of the data."""
  try:
    return structure.flatten_up_to(given)
  except (TypeError, ValueError) as e:
    raise errors.SpecError(
        f"{name} for each ref must be a tree like data, got"
        f" {name}={spec_text.describe(given)} in RingBuffer:"
        f" {spec_text.describe_error(e).splitlines()[0]}",
        code="MGPU121",
        hint=f"Write the {name} of each ref, None for those without multicast",
    ) from e


def check_leader(
    axes: Any, tracked: Any, leaves: list[Any], consumer_reads: str
) -> None:
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
  for leaf, of_leaf in zip(leaves, tracked):
    if not isinstance(of_leaf, plgpu.CopyPartition.PARTITIONED):
      continue
    rank = len(leaf.shape)
    try:
      axis = operator.index(of_leaf.axis)
    except TypeError:
      axis = None
    if axis is None or isinstance(of_leaf.axis, bool) or not 0 <= axis < rank:
      raise errors.SpecError(
          f"expected a dimension of {spec_text.describe(leaf)}, 0 to {rank - 1},"
          f" in leader_tracked, got {of_leaf} in RingBuffer",
          code="MGPU121", spec=leaf, hint="Write PARTITIONED(0)",
      )
