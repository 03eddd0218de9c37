"""What all composite specs are: frozen dataclasses whose parts are specs.

Before a kernel runs the parts are specs; in the kernel's body there is an object of
the same class whose parts are refs. JAX carries it there by itself, since every
composite is a pytree.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
import dataclasses
import functools
import inspect
import operator
from typing import Any
import weakref

import jax

from jax_mgpu_ext._src import avals
from jax_mgpu_ext._src import composites
from jax_mgpu_ext._src import errors
from jax_mgpu_ext._src import spec_text

# A block has at most 1024 CUDA threads (CUDA C++ Programming Guide, "Technical
# Specifications per Compute Capability"), and a warpgroup has 128.
MAX_WARPGROUPS = 8


def composite(
    *parts: str,
    trees: tuple[str, ...] = (),
    generated: Iterable[str] = ("__eq__", "__hash__", "__repr__"),
) -> Callable[[type[Any]], type[Any]]:
  """Makes a frozen dataclass, and the subclasses of it, a composite spec.

  Args:
    *parts: Names of the fields that hold specs, or refs, in the order in which
      JAX allocates them; all others must be hashable, and stay as they are.
    trees: Names of the others that may be trees with hashable leaves.
    generated: The methods that are not the class's own, but written for it by
      `dataclasses.dataclass`; ours take their place.

  Returns:
    A decorator that returns the class.
  """

  def decorate(cls):
    setattr(cls, composites.PARTS, parts)
    cls.get_ref_aval = _get_ref_aval
    cls.get_array_aval = _get_array_aval
    for name in generated:
      setattr(cls, name, _METHODS[name])
    cls._composite_trees = trees
    own_init_subclass = vars(cls).get("__init_subclass__")

    def init_subclass(subclass, **arguments):
      if own_init_subclass is not None:
        own_init_subclass.__func__(subclass, **arguments)
      else:
        super(cls, subclass).__init_subclass__(**arguments)
      _register(subclass)

    cls.__init_subclass__ = classmethod(init_subclass)
    _register(cls)
    return cls

  return decorate


_registered: weakref.WeakSet[type[Any]] = weakref.WeakSet()


def _register(cls: type[Any]) -> None:
  """Makes a class a pytree; its fields are asked for when there are objects."""
  if cls in _registered:
    return
  _registered.add(cls)

  def flatten_with_keys(value):
    children, static = flatten(value)
    keys = map(jax.tree_util.GetAttrKey, getattr(cls, composites.PARTS))
    return list(zip(keys, children)), static

  def flatten(value):
    parts = getattr(cls, composites.PARTS)
    _check_fields(cls, value)
    static = []
    for field in dataclasses.fields(cls):
      if field.name in parts:
        continue
      setting = getattr(value, field.name)
      if field.name in cls._composite_trees:
        leaves, structure = jax.tree.flatten(setting)
        setting = (structure, tuple(leaves))
      static.append((field.name, setting))
    return [getattr(value, name) for name in parts], tuple(static)

  def unflatten(static, children):
    # Not through the constructor: the children may be refs, avals, anything.
    value = object.__new__(cls)
    for name, child in zip(getattr(cls, composites.PARTS), children):
      object.__setattr__(value, name, child)
    for name, setting in static:
      if name in cls._composite_trees:
        structure, leaves = setting
        setting = structure.unflatten(leaves)
      object.__setattr__(value, name, setting)
    return value

  jax.tree_util.register_pytree_with_keys(
      cls, flatten_with_keys, unflatten, flatten
  )


def _check_fields(cls: type[Any], value: Any) -> None:
  """Checks that a subclass has added no specs of its own.

  Raises:
    SpecError: It has; they would be no part of it.
  """
  known = (*getattr(cls, composites.PARTS), *cls._composite_trees)
  fields = {field.name for field in dataclasses.fields(cls)}
  annotated = set()
  for base in cls.__mro__:
    if composites.PARTS in vars(base):
      break
    annotated |= {
        name for name in inspect.get_annotations(base) if hasattr(value, name)
    }
  for name in sorted((fields | annotated) - set(known)):
    held = getattr(value, name, None)
    if composites.is_composite(held) or (
        not isinstance(held, type) and avals.is_ref_spec(held)
    ):
      raise errors.SpecTypeError(
          f"{name}={spec_text.describe(held)} is no part of"
          f" {cls.__qualname__}, which is not a scratch_struct itself",
          code="MGPU126", spec=held,
          hint=f"Write @specs.scratch_struct above class {cls.__name__}",
      )


def _hash(self: Any) -> int:
  """Hashes the leaves, as dataclasses do not where a field is a dict or a list."""
  leaves, structure = jax.tree.flatten(self)
  return hash((structure, tuple(leaves)))


def _eq(self: Any, other: Any) -> Any:
  """Compares leaves and structure, as `_hash` does."""
  if type(other) is not type(self):
    return NotImplemented
  return jax.tree.flatten(self) == jax.tree.flatten(other)


def _repr(self: Any) -> str:
  """Writes specs as the calls that make them."""
  return spec_text.describe(self, limit=1000)


_METHODS = {"__eq__": _eq, "__hash__": _hash, "__repr__": _repr}


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


def in_kernel(method: Callable[..., Any]) -> Callable[..., Any]:
  """Makes a method of a ring one for refs, refused where there are none yet."""

  @functools.wraps(method)
  def wrapper(self, *args, **kwargs):
    if not isinstance(getattr(self.full, "ref", self.full), jax.core.Tracer):
      name = type(self).__name__
      raise errors.SpecTypeError(
          f"{method.__name__} was called on the spec, which has no memory: {self}",
          code="MGPU125", spec=self,
          hint=f"Call it on the {name} that the body of the kernel gets in the"
          " place of the spec; what dataclasses.replace makes of that is a spec",
      )
    return method(self, *args, **kwargs)

  return wrapper


def count(
    name: str, value: Any, least: int, cls: str, most: int | None = None
) -> int:
  """Returns an argument that counts something, as an int.

  Raises:
    SpecError: It is none (and a `TypeError`, if it is no integer at all), or is
      less than `least` or more than `most`.
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
        f"{name} must be at least {least}, got {name}="
        f"{spec_text.describe(number)} in {cls}",
        code="MGPU121", hint=f"Write {name}={least} or more",
    )
  if most is not None and number > most:
    raise errors.SpecError(
        f"{name} must be at most {most}, got {name}="
        f"{spec_text.describe(number)} in {cls}",
        code="MGPU121", hint="Count warpgroups, not warps or CUDA threads",
    )
  return number


def is_axis_name(value: Any) -> bool:
  """Returns whether an object can name one axis of a mesh."""
  return (
      isinstance(value, Hashable)
      and not isinstance(value, (bool, frozenset, Iterator, type))
      and value != ""
      and jax.tree_util.all_leaves([value])  # No tuple, no None.
  )


def check_threads(
    spec: Any, wanted: dict[str, int], mesh: composites.Mesh
) -> None:
  """Checks that a kernel has the threads that use a ring.

  Args:
    spec: The ring.
    wanted: Name of an argument -> the threads that it says there are.
    mesh: What of the kernel can use it.

  Raises:
    SpecError: There are fewer.
  """
  found = f"num_threads={mesh.num_threads}"
  hint = "Pass num_threads={} and a thread_name to plgpu.kernel"
  if mesh.scope is not None:
    found = (
        f"{mesh.num_threads}, which share it by"
        f" collective_axes={spec_text.describe(mesh.scope)} of pl.run_scoped"
    )
    hint += ", and collective_axes=thread_name to pl.run_scoped"
  for name, threads in wanted.items():
    if threads > mesh.num_threads:
      raise errors.SpecError(
          f"a ring with {name}={threads} needs as many threads (warpgroups), got"
          f" {found}: it would wait for ever",
          code="MGPU124", spec=spec,
          hint=hint.format(min(threads + 1, MAX_WARPGROUPS)),
      )


def check_axes(spec: Any, wanted: Any, axes: dict[Any, int]) -> None:
  """Checks that a kernel has the axes that a ring names.

  Args:
    spec: The ring.
    wanted: Names of axes.
    axes: Name -> size of those that there are.

  Raises:
    ClusterAxisError: One is not there.
  """
  for axis in wanted:
    if axis not in axes:
      raise spec_text.unknown_axis_error(axis, axes, tuple(wanted), spec)
