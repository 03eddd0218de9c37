"""What a hook module declares: data about the change, and how to make it.

A module `hooks/<slug>.py` holds one `HOOK` and imports nothing of JAX at its
top level, since it is loaded while JAX's modules are still being imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import operator
import sys
from typing import Any

MOSAIC_CORE = "jax._src.pallas.mosaic_gpu.core"
PALLAS_CORE = "jax._src.pallas.core"

# The fingerprint of a name that JAX does not have, and that a hook adds.
ABSENT = "absent"
_MISSING = object()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
  """Something of JAX that a hook replaces or adds.

  Attributes:
    module: The module that defines it.
    name: Its dotted name in the module, as `RefUnion.__init__`.
    aliases: `module:name` of every place in JAX that binds the same object.
    optional: The change works without it, in releases that do not have it.
  """

  module: str
  name: str
  aliases: tuple[str, ...] = ()
  optional: bool = False

  def __str__(self) -> str:
    return f"{self.module}:{self.name}"

  @property
  def attribute(self) -> str:
    return self.name.rpartition(".")[2]

  def owner(self) -> Any:
    """Returns the module or class that holds the target, or None."""
    found = sys.modules.get(self.module)
    for part in self.name.split(".")[:-1]:
      found = getattr(found, part, None)
    return found

  def current(self) -> Any:
    """Returns the raw attribute as it is now, or None if there is none."""
    value = vars(self.owner() or object).get(self.attribute, _MISSING)
    return None if value is _MISSING else value


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hook:
  """One change to JAX.

  Attributes:
    slug: Its name everywhere: module, patch, command line, environment.
    why: One sentence for `mgpu-ext hooks` and the docs.
    codes: The catalog codes that it can raise.
    targets: What it replaces or adds.
    apply: Makes the change through the ledger that it is given. There is no
      way back to write: the ledger restores what it saved.
    since: The first release that has the thing to change, as `0.11.2`.
    before: Why an earlier release cannot have the change, if not because it lacks
      the fault.
    until: The first release that makes the change itself.
    native: What the git patch of the same slug adds to JAX's sources. Where it
      stands, the hook stays away.
  """

  slug: str
  why: str
  codes: tuple[str, ...]
  targets: tuple[Target, ...]
  apply: Callable[[Any], None]
  since: str | None = None
  before: str = ""
  until: str | None = None
  native: Target | None = None

  @property
  def modules(self) -> frozenset[str]:
    """The JAX modules that must have been imported before `apply`."""
    return frozenset(target.module for target in self.targets)


# Functions that more than one hook wraps.
KERNEL = Target(
    module=MOSAIC_CORE,
    name="kernel",
    aliases=("jax.experimental.pallas.mosaic_gpu:kernel",),
)
PALLAS_CALL = Target(
    module="jax._src.pallas.pallas_call",
    name="pallas_call",
    aliases=("jax.experimental.pallas:pallas_call",),
)
RUN_SCOPED = Target(
    module="jax._src.pallas.primitives",
    name="run_scoped",
    aliases=("jax.experimental.pallas:run_scoped",),
)
GRID_MAPPING = Target(module=PALLAS_CORE, name="get_grid_mapping")
OUT_TYPE = Target(module=PALLAS_CORE, name="_convert_out_shape_to_aval")
MPMD_MAP = Target(module="jax._src.pallas.mpmd", name="_mpmd_map")
MPMD_LEAF = Target(module="jax._src.pallas.mpmd", name="_aval_to_ref_aval")


def is_not_specified(value: Any) -> bool:
  """Returns whether a value is JAX's mark for an argument that is not given."""
  return type(value).__name__ == "NotSpecified"


def scratch_items(tree: Any) -> tuple[Any, bool]:
  """Returns a scratch tree of `plgpu.kernel` as JAX hands it on, and if it does.

  JAX passes the items of any sequence and of any mapping to the kernel's body,
  pytree or not, and drops all else in silence.
  """
  # Subclasses, which need not be pytrees, become the plain container.
  if type(tree) in (list, tuple, dict):
    return tree, True
  if isinstance(tree, Mapping):
    return dict(tree), True
  if isinstance(tree, Sequence) and not isinstance(tree, str):
    return tuple(tree), True
  return tree, False


def as_integer(value: Any) -> int | None:
  """Returns a concrete integer as an `int`, or None if it is not one."""
  if type(value) is int:  # pylint: disable=unidiomatic-typecheck
    return value
  # A traced value would say so itself, but takes long to put it into words.
  if isinstance(value, sys.modules["jax._src.core"].Tracer):
    return None
  try:
    return int(operator.index(value))
  except Exception:  # pylint: disable=broad-exception-caught
    # Each kind of value that is no integer yet, traced or symbolic, has its own
    # exception.
    return None


def flat_axes(axes: Any) -> list[Any]:
  """Returns the names in a `collective_axes`, out of nested tuples."""
  flat = []
  for axis in axes:
    flat += axis if isinstance(axis, tuple) else [axis]
  return flat


def unwrap(function: Any) -> Any:
  """Returns the function under the wrappers of our hooks."""
  while hasattr(function, "__wrapped__"):
    function = function.__wrapped__
  return function


def resolve(target: str) -> Any:
  """Returns what stands at `module:name` or `module.name`."""
  module_name, colon, name = target.partition(":")
  if not colon:
    module_name = target
    while module_name and module_name not in sys.modules:
      module_name = module_name.rpartition(".")[0]
    name = target.removeprefix(f"{module_name}.")
  found = sys.modules.get(module_name)
  for part in name.split("."):
    found = getattr(found, part, None)
  if found is None:
    raise AttributeError(
        f"expected module:name of something that is imported, got {target!r}"
    )
  return found
