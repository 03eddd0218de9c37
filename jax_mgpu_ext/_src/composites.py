"""Which specs are composites of others, and where they stand in a tree."""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
from typing import Any

# The attribute of a class of composite specs that names their parts.
PARTS = "_composite_parts"
# What a composite may define to be checked against the kernel it goes into:
# (self, mesh: Mesh) -> None, or a SpecError.
CHECK_MESH = "_check_mesh"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mesh:
  """What of a kernel can use a composite.

  Attributes:
    num_threads: Threads (warpgroups) of a block that share it.
    axes: Name -> size of the axes along which blocks can work together.
    scope: The `collective_axes` of the `pl.run_scoped` that allocates it, or None
      for the kernel's own scratch.
  """

  num_threads: int
  axes: dict[Any, int]
  scope: tuple[Any, ...] | None = None


def is_composite(spec: Any) -> bool:
  """Returns whether a spec is a composite of others, and thus a pytree."""
  return hasattr(type(spec), PARTS)


def find(tree: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
  """Yields the composite specs of a tree, outer ones first, with their paths.

  Args:
    tree: A pytree of specs.
  """
  import jax  # pylint: disable=g-import-not-at-top

  nodes, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_composite)
  for path, node in nodes:
    if is_composite(node):
      yield path, node
      for part in getattr(type(node), PARTS):
        own = (*path, jax.tree_util.GetAttrKey(part))
        for inner, found in find(getattr(node, part)):
          yield (*own, *inner), found
