"""Bundles of specs with names, in place of positional refs."""

from __future__ import annotations

import dataclasses
import enum
import inspect
from typing import Any, TypeVar

import jax

from jax_mgpu_ext._src import avals
from jax_mgpu_ext._src import composites
from jax_mgpu_ext._src import errors
from jax_mgpu_ext._src import spec_text
from jax_mgpu_ext._src.specs import composite

T = TypeVar("T")
# What JAX, or this package, calls or reads of a bundle.
_RESERVED = ("get_ref_aval", "get_array_aval", composites.CHECK_MESH)


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
  a spec, a tree of specs, or another bundle, and in the kernel the refs. A subclass
  that is decorated, too, adds its attributes to those of its base.

  Args:
    cls: The class.

  Raises:
    SpecError: It is no class that can be made a bundle.
  """
  _check_class(cls)
  generated = {"__eq__", "__hash__", "__repr__"} - vars(cls).keys()
  try:
    made = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
  except (TypeError, ValueError) as e:
    raise errors.SpecTypeError(
        f"{spec_text.describe_error(e)}: {cls.__qualname__} cannot be a"
        " scratch_struct",
        code="MGPU126", spec=cls,
        hint="Give it annotated attributes, and bundles or plain classes as bases",
    ) from e
  names = []
  for field in dataclasses.fields(made):
    if field.name in _RESERVED:
      raise errors.SpecTypeError(
          f"the name {field.name} is taken, in scratch_struct {cls.__qualname__}",
          code="MGPU126", spec=cls, hint="Rename the attribute",
      )
    if not field.init:
      raise errors.SpecTypeError(
          "expected attributes that are given when a bundle is made, got"
          f" {field.name} with init=False in scratch_struct {cls.__qualname__}",
          code="MGPU126", spec=cls, hint="Leave init=False out",
      )
    names.append(field.name)
  return composite.composite(*names, generated=generated)(made)


def _check_class(cls: Any) -> None:
  """Checks that a class can be made a bundle, before it is changed.

  Raises:
    SpecError: It cannot.
  """
  hint = None
  if not isinstance(cls, type):
    problem = f"expected a class, got {spec_text.describe(cls)}"
    hint = "Write @specs.scratch_struct above a class, without arguments"
  elif composites.PARTS in vars(cls):
    problem = f"{cls.__qualname__} is a composite spec already"
    hint = "Decorate it once"
  elif dataclasses.is_dataclass(cls) and "__dataclass_fields__" in vars(cls):
    problem = f"{cls.__qualname__} is a dataclass already"
    hint = "Leave its @dataclass out: scratch_struct makes it one"
  elif issubclass(cls, enum.Enum) or not _is_plain(cls):
    problem = (
        f"{cls.__qualname__} is a container, an enumeration or a pytree already"
    )
    hint = "Write a plain class with annotated attributes"
  else:
    annotated = inspect.get_annotations(cls)
    for name, value in vars(cls).items():
      if name in _RESERVED:
        problem = f"{name} of {cls.__qualname__} is a name that JAX or we use"
        hint = "Rename it"
        break
      if name == "__slots__" or isinstance(value, property) and name in annotated:
        problem = f"{name} of {cls.__qualname__} is in the way of its attributes"
        hint = "Leave it out"
        break
      if name not in annotated and not name.startswith("__") and _is_spec(value):
        problem = (
            f"{name} holds {spec_text.describe(value)}, and has no annotation"
        )
        hint = f"Write {name}: Any = ..., or it would be no attribute of the bundle"
        break
    for name, kind in annotated.items():
      if isinstance(kind, dataclasses.InitVar) or "InitVar" in str(kind):
        problem = f"{name} of {cls.__qualname__} is an InitVar, and no attribute"
        hint = "Leave it out: a bundle is made of its attributes alone"
  if hint is not None:
    raise errors.SpecTypeError(
        f"{problem}: it cannot be made a scratch_struct", code="MGPU126",
        spec=cls, hint=hint,
    )


def _is_spec(value: Any) -> bool:
  return not isinstance(value, type) and (
      composites.is_composite(value) or avals.is_ref_spec(value)
  )


def _is_plain(cls: type[Any]) -> bool:
  """Returns whether JAX takes the objects of a class as leaves."""
  if any(composites.PARTS in vars(base) for base in cls.__mro__):
    return True  # Not plain, but a subclass of a bundle.
  try:
    value = object.__new__(cls)
  except TypeError:
    return False  # A subclass of dict, say, or an abstract class.
  return jax.tree_util.all_leaves([value])
