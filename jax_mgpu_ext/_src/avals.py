"""The type-dispatching extractor: one answer to "what aval is this spec?".

Every spec has two questions, `ref_aval` and `array_aval`, and each has one
answer: an aval, or a `SpecError`. The answer is found by the type of the spec,
along its method resolution order, in a table (`aval_table.py`) that
`register_spec` extends.

This module imports no JAX at its top level: it is loaded while JAX's modules
are still being imported, and by programs that may never use Pallas.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import functools
import sys
from typing import Any

from jax_mgpu_ext._src import aval_table
from jax_mgpu_ext._src import composites
from jax_mgpu_ext._src import errors
from jax_mgpu_ext._src import spec_text
from jax_mgpu_ext._src import weak_cache

_MOSAIC_CORE = "jax._src.pallas.mosaic_gpu.core"

_registered: dict[type[Any], aval_table.Entry] = {}


def ref_aval(spec: Any) -> Any:
  """Returns the ref aval of a spec: the type of the ref that a kernel gets.

  Args:
    spec: A spec of JAX or of this package, an instance of a registered type, or
      a ref aval, which is its own answer.

  Returns:
    An `AbstractRef`, or a `TransformedRef` around one for specs with
    transforms. A spec always gets the same object. For a composite spec, the same
    composite with the ref avals of its parts.

  Raises:
    SpecError: The object describes no ref; says what to write instead. Also an
      instance of the exception that JAX raises for it.
  """
  known = _known.known.get(id(spec))
  # The identity may be that of a spec that is gone.
  if known is not None and known[0]() is spec:
    return known[1]
  if composites.is_composite(spec):
    return ref_avals(spec, root=type(spec).__name__)
  entry = _entry_of(type(spec))
  aval = _answer(entry.ref_aval, spec)
  if not isinstance(aval, aval_table.ref_types()):
    raise errors.SpecTypeError(
        f"expected a ref aval as the answer for {spec_text.describe(spec)}, got"
        f" {spec_text.describe(aval)}",
        code="MGPU006", spec=spec,
        hint=(
            "Whatever was registered for the type, or is its get_ref_aval, must"
            " return an aval: end it in .get_ref_aval() of a spec of Pallas"
        ),
    )
  if entry.cached:
    _known.put(spec, aval)
  return aval


# The ref avals of live specs.
_known = weak_cache.IdentityCache()


def array_aval(spec: Any) -> Any:
  """Returns the array aval of a spec: the type of an array of that kind.

  Args:
    spec: A spec, or anything that has a shape and a dtype.

  Returns:
    A `ShapedArray`, equal to JAX's own answer wherever JAX has one.

  Raises:
    SpecError: The object describes no array; says what to write instead. Also
      an instance of the exception that JAX raises for it.
  """
  return _answer(_entry_of(type(spec)).array_aval, spec)


def ref_avals(tree: Any, *, root: str = "specs") -> Any:
  """Returns the tree with each spec replaced by its ref aval.

  Args:
    tree: A pytree of specs. None counts as an empty tree.
    root: The name that paths in errors start with.

  Raises:
    SpecError: See `ref_aval`; carries the path of the leaf.
  """
  return map_specs(ref_aval, tree, root)


def array_avals(tree: Any, *, root: str = "specs") -> Any:
  """Returns the tree with each spec replaced by its array aval.

  Args:
    tree: A pytree of specs. None counts as an empty tree.
    root: The name that paths in errors start with.

  Raises:
    SpecError: See `array_aval`; carries the path of the leaf.
  """
  return map_specs(array_aval, tree, root)


def map_specs(
    function: Callable[[Any], Any], tree: Any, root: str
) -> Any:
  """Maps a function over the leaves of a tree, linear in their number.

  Args:
    function: Leaf -> new leaf.
    tree: A pytree of specs.
    root: The name that paths in errors start with.

  Raises:
    SpecError: What the function raised, with the path of the leaf.
  """
  leaves, treedef = flatten(tree)
  results = []
  for leaf in leaves:
    try:
      results.append(function(leaf))
    except errors.SpecError as e:
      # The path is only worked out for the leaf that failed.
      spec_text.attach_path_at(e, tree, len(results), root)
      raise
  return treedef.unflatten(results)


def check_specs(
    function: Callable[[Any], Any], tree: Any, root: str
) -> None:
  """Calls a function for each leaf of a tree; as `map_specs` without a result."""
  for index, leaf in enumerate(flatten(tree)[0]):
    try:
      function(leaf)
    except errors.SpecError as e:
      spec_text.attach_path_at(e, tree, index, root)
      raise


def flatten(tree: Any) -> tuple[list[Any], Any]:
  """Returns the leaves of a tree and its structure."""
  import jax  # pylint: disable=g-import-not-at-top

  return jax.tree.flatten(tree)


def is_barrier(spec: Any) -> bool:
  """Returns whether a spec, or a ref aval, is a barrier of either kind."""
  core = sys.modules.get(_MOSAIC_CORE)
  return core is not None and (
      isinstance(spec, (core.Barrier, core.ClusterBarrier))
      or isinstance(
          spec_text.safe_getattr(spec, "dtype"),
          (core.BarrierType, core.ClusterBarrierType),
      )
  )


def is_cluster_barrier(spec: Any) -> bool:
  """Returns whether a spec, or a ref aval, is a cluster barrier."""
  core = sys.modules.get(_MOSAIC_CORE)
  return core is not None and (
      isinstance(spec, core.ClusterBarrier)
      or isinstance(
          spec_text.safe_getattr(spec, "dtype"), core.ClusterBarrierType
      )
  )


def is_array_spec(spec: Any) -> bool:
  """Returns whether `array_aval` has an answer for this kind of spec."""
  entry = _entry_of(type(spec))
  if entry is aval_table.UNKNOWN:
    return spec_text.looks_like_array(spec)
  return entry.is_array


def is_ref_spec(spec: Any) -> bool:
  """Returns whether an object is a spec, or a ref aval, at all."""
  return _entry_of(type(spec)).is_ref or (
      not isinstance(spec, type)
      and spec_text.safe_getattr(spec, "get_ref_aval") is not None
  )


def is_routed(spec: Any) -> bool:
  """Returns whether JAX's own extraction of a spec goes through this module.

  True for the spec types of Mosaic GPU and for registered ones. Everything
  else, as the specs of the TPU backend, is left to JAX.
  """
  return _entry_of(type(spec)).is_routed


def is_registered(spec: Any) -> bool:
  """Returns whether only this module, not JAX, can answer for a spec."""
  return any(base in _registered for base in type(spec).__mro__)


def no_spec_error(value: Any) -> errors.SpecError:
  """Returns the error for a leaf that describes no ref."""
  return spec_text.no_spec_error(
      value,
      describes_refs=isinstance(value, type) and _entry_of(value).is_ref,
  )


def register_spec(
    cls: type[Any],
    *,
    ref_aval: Callable[[Any], Any] | str | None = None,  # pylint: disable=redefined-outer-name
    array_aval: Callable[[Any], Any] | str | None = None,  # pylint: disable=redefined-outer-name
    override: bool = False,
) -> None:
  """Makes a type a spec type, for this package and, with hooks on, for JAX.

  Subclasses inherit the registration unless they have their own.

  Args:
    cls: The type. Instances must be leaves of a pytree, not containers.
    ref_aval: Spec -> ref aval. A string is the text of the `SpecError` that is
      raised instead. None stands for the type's own `get_ref_aval` method.
    array_aval: The same for the array aval (`get_array_aval`); a type without
      that method gets the documented error.
    override: Replace a registration, or an answer of JAX's own types.

  Raises:
    RegistrationError: The type has a registration already, or an argument is
      of the wrong kind.
  """
  if not isinstance(cls, type):
    raise errors.RegistrationError(
        f"expected a class, got cls={spec_text.describe(cls)}",
        code="MGPU081", spec=cls, hint="Register type(spec), not spec",
    )
  for name, value in (("ref_aval", ref_aval), ("array_aval", array_aval)):
    if value is not None and not isinstance(value, str) and not callable(value):
      raise errors.RegistrationError(
          f"expected a function, an error text or None, got {name}="
          f"{spec_text.describe(value)}",
          code="MGPU081", spec=cls,
      )
  if not override and (
      cls in _registered or cls in aval_table.builtin_entries()
  ):
    raise errors.RegistrationError(
        f"{cls.__qualname__} is a spec type already",
        code="MGPU080", spec=cls,
        hint="Pass override=True to replace its answers",
    )
  if ref_aval is None and not hasattr(cls, "get_ref_aval"):
    ref_aval = f"{cls.__qualname__} describes no ref"
  if array_aval is None and not hasattr(cls, "get_array_aval"):
    array_aval = f"{cls.__qualname__} specs are not arrays"
  _registered[cls] = aval_table.Entry(
      ref_aval=_as_function(ref_aval, "get_ref_aval", "MGPU001"),
      array_aval=_as_function(array_aval, "get_array_aval", "MGPU010"),
      is_array=not isinstance(array_aval, str),
  )
  if (core := _patched_core()) is not None:
    core.register_spec(
        cls,
        ref_aval=_registered[cls].ref_aval,
        array_aval=_registered[cls].array_aval,
        override=True,
    )
  _forget()


def unregister_spec(cls: type[Any]) -> None:
  """Undoes `register_spec`; JAX's own types get their own answers back.

  Raises:
    RegistrationError: The type is not registered.
  """
  if not isinstance(cls, type) or cls not in _registered:
    raise errors.RegistrationError(
        "expected a registered spec type, got"
        f" {spec_text.describe(cls)}",
        code="MGPU081", spec=cls,
        hint="Types are registered by register_spec, and only once",
    )
  del _registered[cls]
  if (core := _patched_core()) is not None:
    core.unregister_spec(cls)
  _forget()


@functools.cache
def _patched_core() -> Any:
  """Returns JAX's module if it has a registry of its own, by our git patches.

  Asked for every new spec, and the same for as long as the process lives.
  """
  aval_table.builtin_entries()  # Imports the module.
  core = sys.modules[_MOSAIC_CORE]
  return core if hasattr(core.pallas_core, "_spec_aval_rules") else None


def _as_function(
    answer: Callable[[Any], Any] | str | None, method: str, code: str
) -> Callable[[Any], Any]:
  if callable(answer):
    return answer
  if answer is None:
    return lambda spec: getattr(spec, method)()

  def refuse(spec):
    raise errors.SpecError(answer, code=code, spec=spec)

  return refuse


def _answer(extract: Callable[[Any], Any], spec: Any) -> Any:
  """Calls an extractor; turns what JAX raises on its own into `SpecError`."""
  try:
    return extract(spec)
  except errors.SpecError as e:
    if e.spec is None:
      e.spec = spec
    raise
  except (
      ArithmeticError, AssertionError, AttributeError, LookupError,
      NotImplementedError, TypeError, ValueError,
  ) as e:
    problem = spec_text.describe_error(e)
    who, hint = "JAX", "Check the spec's shape, dtype and transforms"
    if is_registered(spec):
      who = f"the function registered for {type(spec).__qualname__}"
      hint = "Mend that function, or let it raise a SpecError of its own"
    raise errors.spec_error_like(type(e))(
        f"{problem}: {who} cannot derive the aval of"
        f" {spec_text.describe(spec)}",
        code="MGPU004", spec=spec, hint=hint,
    ) from e


def _entry_of(cls: type[Any]) -> aval_table.Entry:
  """Returns the entry of a type."""
  if (core := _patched_core()) is not None:
    # Whoever uses the registry of a patched JAX is not heard of here, so nothing
    # about it is kept.
    rules = core.pallas_core._spec_aval_rules  # pylint: disable=protected-access
    for base in cls.__mro__:
      if base in rules and base not in _registered:
        return aval_table.Entry(rules[base].ref_aval, rules[base].array_aval)
  return _table_entry_of(cls)


@functools.lru_cache(maxsize=1024)
def _table_entry_of(cls: type[Any]) -> aval_table.Entry:
  """Returns the entry of a type; the table is consulted once per type."""
  builtin = aval_table.builtin_entries()
  for base in cls.__mro__:
    if base in _registered:
      return _registered[base]
    if base in builtin:
      entry = builtin[base]
      # Of other people's subclasses we do not know that they are immutable.
      is_own = cls.__module__.partition(".")[0] == "jax"
      return entry if is_own else dataclasses.replace(entry, cached=False)
  if hasattr(cls, "get_ref_aval"):
    return aval_table.PROTOCOL
  return aval_table.UNKNOWN


def _forget() -> None:
  """Drops what was derived from the table before it changed."""
  _table_entry_of.cache_clear()
  _known.clear()
