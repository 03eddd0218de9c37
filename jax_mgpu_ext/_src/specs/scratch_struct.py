"""Bundles of specs with names, in place of positional refs."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

from jax_mgpu_ext._src.specs import composite

T = TypeVar("T")


def scratch_struct(cls: type[T]) -> type[T]:
  """Makes a class a bundle of specs, as a decorator.

    @specs.scratch_struct
    class Scratch:
      ring: Any
      out: Any

    def body(x, o, scratch):
      scratch.ring.producer_acquire(0)

    plgpu.kernel(body, scratch_types=[Scratch(ring=..., out=...)], ...)

  The class becomes a frozen, keyword-only dataclass; each annotated attribute holds
  a spec, a tree of specs, or another bundle, and in the kernel the refs.

  Args:
    cls: The class.
  """
  cls = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
  names = [field.name for field in dataclasses.fields(cls)]
  return composite.composite(*names)(cls)
