"""Refuses scratch trees with wrong leaves, and says where the leaf is.

JAX asks every leaf for `get_ref_aval` and ends in an AttributeError about the
leaf's type. Here the tree is looked through where it is given, outside of any
trace, so that the traceback points at the user's own call.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sized
import functools
import math
import sys
from typing import Any

from jax_mgpu_ext._src import avals
from jax_mgpu_ext._src import composites
from jax_mgpu_ext._src import errors
from jax_mgpu_ext._src import spec_text
from jax_mgpu_ext._src.hooks import cluster_axes
from jax_mgpu_ext._src.hooks import contract


def check_specs(
    tree: Any, root: str, also: tuple[type[Any], ...] = ()
) -> None:
  """Checks that every leaf of a tree describes a ref.

  Args:
    tree: A pytree of specs.
    root: Its name in error messages.
    also: Types of leaves that JAX takes at this place besides specs.

  Raises:
    SpecError: A leaf is no spec, or the class of one; carries its path.
  """

  def check(leaf):
    if not avals.is_ref_spec(leaf) and not isinstance(leaf, also):
      raise avals.no_spec_error(leaf)

  avals.check_specs(check, tree, root)


def check_scratch_types(tree: Any, root: str) -> None:
  """Checks the scratch tree of `plgpu.kernel`, its avals included.

  Raises:
    SpecError: The tree is neither a sequence nor a mapping, or a leaf is no
      spec, or the aval of a leaf cannot be derived.
  """
  tree, is_known = contract.scratch_items(tree)
  if isinstance(tree, dict) and not all(isinstance(k, str) for k in tree):
    return  # No names for keywords, as JAX is about to say.
  if not is_known:
    # What is empty is dropped by right.
    is_empty = isinstance(tree, Sized) and not len(tree)
    if isinstance(tree, Iterator) or not is_empty and avals.flatten(tree)[0]:
      raise errors.SpecTypeError(
          f"expected a sequence or a mapping of specs, got {root}="
          f"{spec_text.describe(tree)}",
          code="MGPU003", spec=tree,
          hint=f"Write {root}=[...] or {root}=dict(name=...)",
      )
    return
  check_specs(tree, root)
  # Derives every aval once, outside of the trace; the trace finds them cached.
  avals.check_specs(avals.ref_aval, tree, root)


def _wrap_kernel(original):
  @functools.wraps(original)
  def kernel(*args, **kwargs):
    # `scratch_shapes` is the keyword up to 0.11.1. A value that stands for
    # "not given" is none of a tree's business.
    for root in ("scratch_types", "scratch_shapes"):
      if root in kwargs and not contract.is_not_specified(kwargs[root]):
        check_scratch_types(kwargs[root], root)
    return original(*args, **kwargs)

  return kernel


def _wrap_run_scoped(original):
  @functools.wraps(original)
  def run_scoped(f, *types, collective_axes=(), **kw_types):
    for tree in filter(None, (types, kw_types)):
      check_specs(tree, "types")
      _check_composites_in_scope(tree, collective_axes)
    return original(f, *types, collective_axes=collective_axes, **kw_types)

  return run_scoped


def _check_composites_in_scope(tree: Any, collective_axes: Any) -> None:
  """Checks the composites of a `run_scoped` against the kernel around it.

  Raises:
    SpecError: More threads use one than share it, or an axis is not there.
  """
  axes = dict(sys.modules["jax._src.core"].get_axis_env().axis_sizes.items())
  shared = (
      collective_axes if isinstance(collective_axes, tuple) else (collective_axes,)
  )
  if not all(isinstance(axis, Hashable) for axis in shared):
    return  # JAX is about to say so.
  # Programs along these axes share the allocation: for Mosaic GPU, threads.
  num_threads = math.prod(axes.get(axis, 1) for axis in shared)
  mesh = composites.Mesh(num_threads=num_threads, axes=axes, scope=shared)
  cluster_axes.check_composites(tree, "types", mesh)


def _wrap_pallas_call(original):
  @functools.wraps(original)
  def pallas_call(*args, **kwargs):
    if "scratch_shapes" in kwargs:
      check_specs(kwargs["scratch_shapes"], "scratch_shapes")
    return original(*args, **kwargs)

  return pallas_call


def _wrap_get_grid_mapping(original):
  @functools.wraps(original)
  def get_grid_mapping(grid_spec, *args, **kwargs):
    check_specs(grid_spec.scratch_shapes, "scratch_shapes")
    return original(grid_spec, *args, **kwargs)

  return get_grid_mapping


def _wrap_mpmd_map(original):
  abstract_value = sys.modules["jax._src.core"].AbstractValue

  @functools.wraps(original)
  def _mpmd_map(*args, scratch_types=(), **kwargs):
    items, _ = contract.scratch_items(scratch_types)
    check_specs(items, "scratch_types", also=(abstract_value,))
    return original(*args, scratch_types=scratch_types, **kwargs)

  return _mpmd_map


def _apply(ledger) -> None:
  ledger.replace(contract.KERNEL, _wrap_kernel)
  ledger.replace(contract.RUN_SCOPED, _wrap_run_scoped)
  ledger.replace(contract.PALLAS_CALL, _wrap_pallas_call)
  ledger.replace(contract.GRID_MAPPING, _wrap_get_grid_mapping)
  ledger.replace(contract.MPMD_MAP, _wrap_mpmd_map)


HOOK = contract.Hook(
    slug="scratch_trees",
    why=(
        "A scratch leaf that is no spec is refused where it is given, with its"
        " path in the tree and what to write instead"
    ),
    codes=("MGPU001", "MGPU002", "MGPU003"),
    targets=(
        contract.KERNEL,
        contract.RUN_SCOPED,
        contract.PALLAS_CALL,
        contract.GRID_MAPPING,
        contract.MPMD_MAP,
    ),
    apply=_apply,
    native=contract.Target(
        module=contract.MOSAIC_CORE, name="_check_scratch_types"
    ),
)
