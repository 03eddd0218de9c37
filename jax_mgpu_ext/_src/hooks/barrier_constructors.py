"""Checks the arguments of `Barrier` and `ClusterBarrier` when they are made."""

from __future__ import annotations

from collections.abc import Sequence
import functools
from typing import Any

from jax_mgpu_ext._src import errors
from jax_mgpu_ext._src import spec_text
from jax_mgpu_ext._src.hooks import contract

# The largest count that an mbarrier can be initialised with: 2**20 - 1 (PTX
# ISA, section "mbarrier", "Valid range of each component": expected and pending
# arrival counts are 1 .. 2**20-1).
MAX_ARRIVALS = 2**20 - 1

_INTEGER_HINT = (
    "Python and NumPy integers are integers; a traced value is not, since the"
    " count must be known when the kernel is built"
)


def _check_barrier(spec: Any) -> None:
  """Checks and canonicalises the fields of a barrier, before JAX does.

  Args:
    spec: A frozen `Barrier` or `ClusterBarrier` whose `__post_init__` runs.

  Raises:
    SpecTypeError: A count is not an integer.
    SpecError: A count is out of range.
  """
  name = type(spec).__name__
  arrivals = contract.as_integer(spec.num_arrivals)
  if arrivals is None:
    raise errors.SpecTypeError(
        "num_arrivals must be an integer, got"
        f" num_arrivals={spec_text.describe(spec.num_arrivals)} in {name}",
        code="MGPU020", hint=_INTEGER_HINT,
    )
  if arrivals < 1:
    raise errors.SpecError(
        f"Num arrivals must be at least 1, but got {spec_text.describe(arrivals)}"
        f": num_arrivals={spec_text.describe(arrivals)} in {name}",
        code="MGPU021",
        hint="A phase completes when that many arrivals have come; write 1",
    )
  if arrivals > MAX_ARRIVALS:
    raise errors.SpecError(
        f"num_arrivals must be at most {MAX_ARRIVALS} (2**20-1), which is all"
        " that an mbarrier counts, got"
        f" num_arrivals={spec_text.describe(arrivals)} in {name}",
        code="MGPU021",
        hint="Let one thread arrive for many, or use several barriers",
    )
  object.__setattr__(spec, "num_arrivals", arrivals)
  object.__setattr__(
      spec, "num_barriers", _check_num_barriers(spec.num_barriers, name)
  )


def _check_num_barriers(value: Any, name: str) -> Any:
  """Returns the shape of a barrier array as JAX canonicalises it: a tuple."""
  scalar = contract.as_integer(value)
  if scalar is not None:
    dims: tuple[Any, ...] = (scalar,)
  elif isinstance(value, (str, bytes, dict, set, frozenset)):
    dims = (None,)
  else:
    try:
      dims = tuple(map(contract.as_integer, value))
    except TypeError:
      dims = (None,)
  if None in dims:
    raise errors.SpecTypeError(
        "num_barriers must be an integer or a sequence of integers, got"
        f" num_barriers={spec_text.describe(value)} in {name}",
        code="MGPU020", hint=_INTEGER_HINT,
    )
  if any(dim < 1 for dim in dims):
    raise errors.SpecError(
        "num_barriers must be at least 1 in every dimension, got"
        f" num_barriers={spec_text.describe(value)} in {name}",
        code="MGPU022",
        hint="Leave the barrier out of the scratch types if none is needed",
    )
  return dims


def _check_collective_axes(spec: Any) -> None:
  """Checks and canonicalises `ClusterBarrier.collective_axes`.

  Raises:
    SpecTypeError: It is not a sequence of axis names.
    SpecError: It names an axis twice.
  """
  axes = spec.collective_axes
  if isinstance(axes, str):
    raise errors.SpecTypeError(
        "collective_axes must be a tuple of axis names, got"
        f" collective_axes={spec_text.describe(axes)}",
        code="MGPU023",
        hint=f"Write collective_axes=({spec_text.describe(axes)},)",
    )
  if not isinstance(axes, Sequence):
    raise errors.SpecTypeError(
        "collective_axes must be a tuple of axis names, got"
        f" collective_axes={spec_text.describe(axes)}",
        code="MGPU023",
        hint="Write collective_axes=('x',), with the names in cluster_names",
    )
  axes = tuple(tuple(a) if isinstance(a, list) else a for a in axes)
  seen = []
  for axis in contract.flat_axes(axes):
    if axis in seen:
      raise errors.SpecError(
          "collective_axes must name each axis once, got"
          f" {spec_text.describe(axis)} twice in"
          f" collective_axes={spec_text.describe(axes)}",
          code="MGPU024", hint="Name it once: the barrier spans the axis anyway",
      )
    seen.append(axis)
  object.__setattr__(spec, "collective_axes", axes)


def _wrap_barrier(original):
  @functools.wraps(original)
  def __post_init__(self):
    _check_barrier(self)
    original(self)

  return __post_init__


def _wrap_cluster_barrier(original):
  @functools.wraps(original)
  def __post_init__(self):
    _check_barrier(self)
    _check_collective_axes(self)
    original(self)

  return __post_init__


_BARRIER = contract.Target(
    module=contract.MOSAIC_CORE, name="Barrier.__post_init__"
)
_CLUSTER_BARRIER = contract.Target(
    module=contract.MOSAIC_CORE, name="ClusterBarrier.__post_init__"
)


def _apply(ledger) -> None:
  ledger.replace(_BARRIER, _wrap_barrier)
  ledger.replace(_CLUSTER_BARRIER, _wrap_cluster_barrier)


HOOK = contract.Hook(
    slug="barrier_constructors",
    why=(
        "Barrier counts and axes that end in a compiler error or a hang are"
        " refused in the constructor"
    ),
    codes=("MGPU020", "MGPU021", "MGPU022", "MGPU023", "MGPU024"),
    targets=(_BARRIER, _CLUSTER_BARRIER),
    apply=_apply,
    native=contract.Target(
        module=contract.MOSAIC_CORE, name="_canonicalize_num_arrivals"
    ),
)
