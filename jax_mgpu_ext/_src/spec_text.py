"""How specs, and what was given instead of one, are written in messages."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

from jax_mgpu_ext._src import composites
from jax_mgpu_ext._src import errors


def describe(value: Any, limit: int = 120) -> str:
  """Writes a value for an error message: short, on one line.

  Specs are written as the call that makes them, arrays as dtype and shape.
  """
  try:
    text = _describe(value)
  except Exception:  # pylint: disable=broad-exception-caught
    # A hostile `__repr__` must not hide the error that is being reported.
    text = f"an object of type {type(value).__qualname__}"
  return errors.one_line(text, limit)


def describe_error(error: BaseException) -> str:
  """Writes what an exception says, without the full stop at its end."""
  try:
    text = str(error)
  except Exception:  # pylint: disable=broad-exception-caught
    text = ""
  name = type(error).__name__
  return errors.one_line(text, 300).rstrip(".") or f"{name} without a text"


def safe_getattr(value: Any, name: str) -> Any:
  """Returns an attribute, or None: objects of others may raise anything."""
  try:
    return getattr(value, name, None)
  except Exception:  # pylint: disable=broad-exception-caught
    return None


def _describe(value: Any) -> str:
  if isinstance(value, type):
    return value.__qualname__
  if looks_like_array(value) and not isinstance(value, enum.Enum):
    space = getattr(value, "memory_space", None)
    if hasattr(value, "get_ref_aval") and space is not None:
      name = getattr(space, "name", space)
      return f"{name}({tuple(value.shape)}, {value.dtype})"
    if not dataclasses.is_dataclass(value):
      return f"{value.dtype}{list(value.shape)}"
    if safe_getattr(value, "ref") is not None:  # A part of one.
      return f"ref {value.dtype}{list(value.shape)}"
  if type(value) is dict:  # pylint: disable=unidiomatic-typecheck
    items = (f"{key!r}: {_describe(item)}" for key, item in value.items())
    return "{" + ", ".join(items) + "}"
  if type(value) is list:  # pylint: disable=unidiomatic-typecheck
    return f"[{', '.join(map(_describe, value))}]"
  if type(value) is tuple:  # pylint: disable=unidiomatic-typecheck
    items = ", ".join(map(_describe, value))
    return f"({items},)" if len(value) == 1 else f"({items})"
  if dataclasses.is_dataclass(value):
    is_composite = composites.is_composite(value)
    if is_composite and not type(value).__dataclass_params__.repr:
      return repr(value)
    write = _describe if is_composite else repr
    arguments = (
        f"{field.name}={write(getattr(value, field.name))}"
        for field in dataclasses.fields(value)
        if field.repr and not _is_default(value, field)
    )
    return f"{type(value).__qualname__}({', '.join(arguments)})"
  return repr(value)


def _is_default(value: Any, field: dataclasses.Field[Any]) -> bool:
  found = getattr(value, field.name)
  # Arrays compare elementwise, so only an identical one is the default.
  return found is field.default or (
      isinstance(found, (int, str, tuple)) and found == field.default
  )


def looks_like_array(value: Any) -> bool:
  """Returns whether an object, not a class, has a shape and a dtype."""
  return (
      not isinstance(value, type)
      and isinstance(safe_getattr(value, "shape"), (tuple, list))
      and safe_getattr(value, "dtype") is not None
  )


def no_spec_error(value: Any, describes_refs: bool = False) -> errors.SpecError:
  """Returns the error for a leaf that describes no ref.

  Args:
    value: The leaf.
    describes_refs: For a class: whether its instances would be specs.
  """
  if isinstance(value, type):
    return _class_error(value, describes_refs)
  hint = "Allocate refs by specs, as plgpu.SMEM(shape, dtype) or plgpu.Barrier()"
  if safe_getattr(safe_getattr(value, "aval"), "inner_aval") is not None:
    hint = "This ref has its memory already: use it as it is"
  elif dataclasses.is_dataclass(value) and not looks_like_array(value):
    hint = (
        f"Decorate {type(value).__qualname__} with"
        " jax_mgpu_ext.specs.scratch_struct in the place of dataclass, or"
        " register it as a pytree"
    )
  elif isinstance(value, enum.Enum) and callable(value):
    hint = f"Call it: write {value.name}(shape, dtype)"
  elif looks_like_array(value):
    shape = tuple(value.shape)
    dtype = getattr(value.dtype, "name", str(value.dtype))
    hint = (
        f"Name the memory: write plgpu.SMEM({shape}, jnp.{dtype}) (on TPU,"
        f" pltpu.VMEM({shape}, jnp.{dtype}))"
    )
  return errors.NotASpecError(
      f"expected a spec, got {type(value).__qualname__}: {describe(value)}",
      code="MGPU001", spec=value, hint=hint,
  )


def _class_error(cls: type[Any], describes_refs: bool) -> errors.SpecError:
  hint = "Write an instance"
  if issubclass(cls, enum.Enum):
    hint += f", as {cls.__name__}.{next(iter(cls.__members__), '...')}"
  elif describes_refs:
    hint += f", as {cls.__name__}({_required_arguments(cls)})"
  return errors.SpecTypeError(
      f"expected a spec, got the class {cls.__qualname__}",
      code="MGPU002", spec=cls, hint=hint,
  )


def _required_arguments(cls: type[Any]) -> str:
  if not dataclasses.is_dataclass(cls):
    return "..."
  return ", ".join(
      f"{field.name}=..."
      for field in dataclasses.fields(cls)
      if field.init
      and field.default is dataclasses.MISSING
      and field.default_factory is dataclasses.MISSING
  )


def no_output_error(value: Any, words: str) -> errors.SpecError:
  """Returns the error for a leaf of an output tree that is no array type.

  Args:
    value: The leaf.
    words: How JAX begins to say it.
  """
  # JAX raises a TypeError for some classes, as for `jax.ShapeDtypeStruct`.
  kind = errors.SpecTypeError if isinstance(value, type) else errors.SpecError
  return kind(
      f"{words}: expected an array type, got {describe(value)}",
      code="MGPU013", spec=value,
      hint="Write jax.ShapeDtypeStruct(shape, dtype)",
  )


def unknown_axis_error(
    axis: Any, cluster: dict[Any, int], axes: Any, spec: Any
) -> errors.ClusterAxisError:
  """Returns the error for an axis that the cluster does not have.

  Args:
    axis: The axis.
    cluster: Name -> size of those that there are.
    axes: The axes that the spec names.
    spec: The spec.
  """
  name = describe(axis)
  known = ", ".join(map(describe, cluster))
  hint = f"The kernel's cluster_names are ({known},): write those that are meant"
  if not cluster:
    hint = (
        "The kernel has no cluster: pass"
        f" cluster=(2,), cluster_names=({name},), or use a plgpu.Barrier"
    )
  return errors.ClusterAxisError(
      f"Unknown cluster axis {name.strip(chr(39))}, available axes: [{known}]:"
      f" collective_axes={describe(axes)} names {name}",
      code="MGPU030", spec=spec, hint=hint,
  )


def attach_path_at(
    error: errors.SpecError, tree: Any, index: int, root: str
) -> None:
  """Gives an error the path of a leaf in a tree.

  Args:
    error: Gets the path; one that it has already is taken as inside the leaf.
    tree: The tree of specs.
    index: Which leaf, in the order of flattening.
    root: The name of the tree, with which the path begins.
  """
  import jax  # pylint: disable=g-import-not-at-top

  path, leaf = jax.tree_util.tree_leaves_with_path(tree)[index]
  if error.spec is None:
    error.spec = leaf
  inner = f".{error.path}" if error.path else ""
  error.path = root + jax.tree_util.keystr(path) + inner
