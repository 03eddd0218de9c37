"""Splits trees of specs into arrays and the rest, and merges them again."""

from __future__ import annotations

from typing import Any

from jax_mgpu_ext._src import avals
from jax_mgpu_ext._src import spec_text


def partition_specs(tree: Any) -> tuple[Any, Any]:
  """Splits a tree into its array specs and the rest (barriers, accumulators).

  Args:
    tree: A pytree of specs.

  Returns:
    Two trees of the same structure, with None where the spec is in the other
    one. `merge_specs` puts them together again.
  """
  leaves, treedef = avals.flatten(tree)
  mask = [avals.is_array_spec(leaf) for leaf in leaves]
  return (
      treedef.unflatten([x if m else None for x, m in zip(leaves, mask)]),
      treedef.unflatten([None if m else x for x, m in zip(leaves, mask)]),
  )


def merge_specs(first: Any, second: Any) -> Any:
  """Merges what `partition_specs` has split.

  Raises:
    ValueError: The trees differ in structure, or both have a spec in one place.
  """
  import jax  # pylint: disable=g-import-not-at-top

  def pick(path, x, y):
    if x is not None and y is not None:
      raise ValueError(
          "expected a spec in at most one of the two trees, got two at"
          f" specs{jax.tree_util.keystr(path)}: {spec_text.describe(x)} and"
          f" {spec_text.describe(y)}; merge the two results of one"
          " partition_specs call"
      )
    return y if x is None else x

  return jax.tree_util.tree_map_with_path(
      pick, first, second, is_leaf=lambda x: x is None
  )
