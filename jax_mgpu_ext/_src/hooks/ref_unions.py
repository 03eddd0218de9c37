"""Checks the members of a `RefUnion`, and names the one that does not fit."""

from __future__ import annotations

import functools
import sys
from typing import Any

from jax_mgpu_ext._src import avals
from jax_mgpu_ext._src import errors
from jax_mgpu_ext._src import spec_text
from jax_mgpu_ext._src.hooks import contract

_INIT = contract.Target(module=contract.MOSAIC_CORE, name="RefUnion.__init__")
_ROOT = "refs"


def _check_members(refs: tuple[Any, ...]) -> None:
  """Checks the trees of memory refs that a union is made of.

  Raises:
    SpecError: There is none.
    RefUnionLeafError: One is not a memory ref.
    RefUnionMemorySpaceError: They do not share SMEM, or TMEM.
  """
  core = sys.modules[contract.MOSAIC_CORE]
  leaves, _ = avals.flatten(refs)
  if not leaves:
    raise errors.SpecError(
        "RefUnion needs at least one memory ref, got none",
        code="MGPU042",
        hint="Write RefUnion(plgpu.SMEM(...), plgpu.SMEM(...))",
    )
  for index, leaf in enumerate(leaves):
    if isinstance(leaf, type) or not hasattr(leaf, "memory_space"):
      name = getattr(leaf, "__qualname__", type(leaf).__qualname__)
      error = errors.RefUnionLeafError(
          f"RefUnion takes memory refs, got {name}: {spec_text.describe(leaf)}",
          code="MGPU040", spec=leaf,
          hint=(
              "Only plgpu.SMEM(...) or plgpu.TMEM(...) refs can share memory;"
              " allocate the rest beside the union"
          ),
      )
      spec_text.attach_path_at(error, refs, index, _ROOT)
      raise error
  spaces = [leaf.memory_space for leaf in leaves]
  if set(spaces) not in ({core.SMEM}, {core.TMEM}):
    # The first one that differs from the first member, or the first member.
    index = next((i for i, s in enumerate(spaces) if s != spaces[0]), 0)
    kinds = ", ".join(dict.fromkeys(str(space) for space in spaces))
    error = errors.RefUnionMemorySpaceError(
        "All aliased Refs must have the same memory space (SMEM or TMEM). Got"
        f" {kinds}",
        code="MGPU041", spec=leaves[index],
        hint="Make one RefUnion for SMEM and one for TMEM",
    )
    spec_text.attach_path_at(error, refs, index, _ROOT)
    raise error


def _wrap_init(original):
  @functools.wraps(original)
  def __init__(self, *refs):
    _check_members(refs)
    original(self, *refs)

  return __init__


HOOK = contract.Hook(
    slug="ref_unions",
    why=(
        "RefUnion names the member that cannot share the memory, instead of an"
        " AttributeError or a generator object"
    ),
    codes=("MGPU040", "MGPU041", "MGPU042"),
    targets=(_INIT,),
    apply=lambda ledger: ledger.replace(_INIT, _wrap_init),
    native=contract.Target(
        module=contract.MOSAIC_CORE, name="_check_ref_union_members"
    ),
)
