"""What all composite specs are: frozen dataclasses whose parts are specs.

Before a kernel runs the parts are specs; in the kernel's body there is an object of
the same class whose parts are refs. JAX carries it there by itself, since every
composite is a pytree.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import operator
from typing import Any

import jax

from jax_mgpu_ext._src import avals
from jax_mgpu_ext._src import composites
from jax_mgpu_ext._src import errors
from jax_mgpu_ext._src import spec_text


def composite(*parts: str) -> Callable[[type[Any]], type[Any]]:
  """Makes a frozen dataclass a composite spec.

  Args:
    *parts: Names of the fields that hold specs, or refs, in the order in which
      JAX allocates them; all others must be hashable, and stay as they are.

  Returns:
    A decorator that returns the class.
  """

  def decorate(cls):
    others = tuple(
        field.name for field in dataclasses.fields(cls) if field.name not in parts
    )

    def flatten_with_keys(value):
      children = [
          (jax.tree_util.GetAttrKey(name), getattr(value, name))
          for name in parts
      ]
      return children, tuple(getattr(value, name) for name in others)

    def flatten(value):
      return (
          [getattr(value, name) for name in parts],
          tuple(getattr(value, name) for name in others),
      )

    def unflatten(static, children):
      # Not through the constructor: the children may be refs, avals, anything.
      value = object.__new__(cls)
      for name, child in zip(parts, children):
        object.__setattr__(value, name, child)
      for name, setting in zip(others, static):
        object.__setattr__(value, name, setting)
      return value

    setattr(cls, composites.PARTS, parts)
    cls.get_ref_aval = _get_ref_aval
    cls.get_array_aval = _get_array_aval
    jax.tree_util.register_pytree_with_keys(
        cls, flatten_with_keys, unflatten, flatten
    )
    return cls

  return decorate


def _get_ref_aval(self: Any) -> Any:
  """Returns the same composite with the ref avals of its parts."""
  return avals.ref_aval(self)


def _get_array_aval(self: Any) -> Any:
  """Raises: the parts of a composite are several refs, and no array."""
  parts = getattr(type(self), composites.PARTS)
  raise errors.NotAnArrayError(
      f"{type(self).__name__} specs are not arrays: it holds the refs"
      f" {', '.join(parts)}",
      code="MGPU120", spec=self,
      hint="Ask its parts, as " + " or ".join(f"spec.{p}" for p in parts[:2]),
  )


def count(name: str, value: Any, least: int, cls: str) -> int:
  """Returns an argument that counts something, as an int.

  Raises:
    SpecError: It is none (and a `TypeError`, if it is no integer at all), or is
      less than `least`.
  """
  try:
    number = operator.index(value)
  except TypeError:
    number = None
  if number is None or isinstance(value, bool):
    raise errors.SpecTypeError(
        f"{name} must be an integer, got {name}={spec_text.describe(value)} in"
        f" {cls}",
        code="MGPU121",
        hint=f"Write a whole number, {least} or more, as {name}={least}",
    )
  if number < least:
    raise errors.SpecError(
        f"{name} must be at least {least}, got {name}={number} in {cls}",
        code="MGPU121", hint=f"Write {name}={least} or more",
    )
  return number
