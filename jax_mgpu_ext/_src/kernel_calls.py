"""The Mosaic GPU kernels in a traced program, and what is in their bodies."""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
import os
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelCall:
  """One kernel that a program launches.

  Attributes:
    name: Its name.
    jaxpr: Its body, a function of the operands' and outputs' refs.
    grid: Sizes of the grid, in clusters.
    cluster: Sizes of the cluster, in blocks; `()`: none.
    cluster_names: Names of its axes.
    num_threads: Pallas threads of a block, that is, warpgroups.
    compiler_params: As given to `plgpu.kernel`, or the default ones.
    source: Where the program calls it, as `kernel.py:12`; "" if not known.
    interpreted: Whether it was built for interpret mode.
    mesh: JAX's own object with grid, cluster and threads.
  """

  name: str
  jaxpr: Any
  grid: tuple[int, ...]
  cluster: tuple[int, ...]
  cluster_names: tuple[Any, ...]
  num_threads: int
  compiler_params: Any
  source: str
  interpreted: bool
  mesh: Any = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Equation:
  """One equation of a kernel's body.

  Attributes:
    eqn: The equation.
    depth: In how many others it is nested.
    source: Where it was written, as `kernel.py:12`; "" if not known.
  """

  eqn: Any
  depth: int
  source: str


def find(program: Any) -> Iterator[KernelCall]:
  """Yields the Mosaic GPU kernels that a program launches, in its order.

  Not found: `pl.pallas_call` with parameters for the GPU (JAX makes its
  pipeline, and with it all allocations, only when it lowers it), and what is
  inside of functions that a program calls back into, as the rule of a
  `custom_vjp`.

  Args:
    program: `jax.jit(f).trace(...)`, or the jaxpr of one.

  Raises:
    TypeError: It is neither.
  """
  from jax._src import core as jax_core  # pylint: disable=g-import-not-at-top

  jaxpr = program
  while not isinstance(jaxpr, jax_core.Jaxpr):
    if not hasattr(jaxpr, "jaxpr"):
      raise TypeError(
          "expected a traced program, as jax.jit(f).trace(x), or its jaxpr, got"
          f" {type(program).__name__}"
      )
    jaxpr = jaxpr.jaxpr
  yield from _find(jaxpr, "")


def _find(jaxpr: Any, outer: str) -> Iterator[KernelCall]:
  for eqn in jaxpr.eqns:
    source = source_of(eqn, outer)
    if (call := _kernel_call(eqn, source)) is not None:
      yield call
      continue
    for inner in inner_jaxprs(eqn):
      yield from _find(inner, source)


def _kernel_call(eqn: Any, source: str) -> KernelCall | None:
  """Returns the kernel that an equation launches, or None."""
  # pylint: disable=g-import-not-at-top
  from jax._src.pallas import mpmd
  from jax._src.pallas.mosaic_gpu import core
  # pylint: enable=g-import-not-at-top

  if eqn.primitive is not mpmd.mpmd_map_p:
    return None
  meshes, jaxprs = eqn.params["meshes"], eqn.params["jaxprs"]
  if len(jaxprs) != 1 or not isinstance(meshes[0], core.Mesh):
    return None
  [mesh], [jaxpr] = meshes, jaxprs
  params = eqn.params["compiler_params"]
  return KernelCall(
      name=eqn.params["name"] or jaxpr.debug_info.func_name,
      jaxpr=jaxpr,
      grid=tuple(mesh.grid),
      cluster=tuple(mesh.cluster),
      cluster_names=tuple(mesh.cluster_names),
      num_threads=mesh.num_threads or 1,
      compiler_params=core.CompilerParams() if params is None else params,
      source=source,
      interpreted=bool(eqn.params["interpret"]),
      mesh=mesh,
  )


def walk(jaxpr: Any, outer: str = "", depth: int = 0) -> Iterator[Equation]:
  """Yields the equations of a body from top to bottom, nested ones too.

  Args:
    jaxpr: The body.
    outer: The source of what calls it.
    depth: That of its own equations.
  """
  for eqn in jaxpr.eqns:
    source = source_of(eqn, outer)
    yield Equation(eqn=eqn, depth=depth, source=source)
    for inner in inner_jaxprs(eqn):
      yield from walk(inner, source, depth + 1)


def inner_jaxprs(eqn: Any) -> Iterator[Any]:
  """Yields the jaxprs that an equation runs: bodies of loops, branches."""
  from jax._src import core as jax_core  # pylint: disable=g-import-not-at-top

  for value in eqn.params.values():
    for item in value if isinstance(value, (tuple, list)) else (value,):
      # In 0.10.2 one that is closed over constants is of a class of its own.
      if isinstance(item, jax_core.Jaxpr):
        yield item
      elif isinstance(getattr(item, "jaxpr", None), jax_core.Jaxpr):
        yield item.jaxpr


def is_run_scoped(eqn: Any) -> bool:
  """Returns whether an equation allocates refs for a scope."""
  from jax._src.pallas import primitives  # pylint: disable=g-import-not-at-top

  return eqn.primitive is primitives.run_scoped_p


def allocations(eqn: Any, source: str) -> list[tuple[str, Any]]:
  """Returns the refs that a `run_scoped` allocates.

  Args:
    eqn: The equation.
    source: Where it was written.

  Returns:
    Pairs of a path and a ref aval. The path is what the function that gets the
    refs calls them, as `ring.full` or `tiles[0]`, or else where they are
    allocated, as `run_scoped at kernel.py:12 [1]`.
  """
  from jax._src.state import types as state_types  # pylint: disable=g-import-not-at-top

  jaxpr = eqn.params["jaxpr"]
  names = getattr(jaxpr.debug_info, "arg_names", None) or ()
  transforms = eqn.params.get("ref_transforms") or ()
  if len(names) != len(jaxpr.invars):
    names = [""] * len(jaxpr.invars)
  if len(transforms) != len(jaxpr.invars):
    transforms = [()] * len(jaxpr.invars)
  where = " at ".join(filter(None, ("run_scoped", source)))
  found = []
  refs = zip(jaxpr.invars, names, transforms)
  for index, (var, name, own) in enumerate(refs):
    aval = var.aval
    if own:
      aval = state_types.TransformedRef(aval, tuple(own))
    found.append((name or f"{where} [{index}]", aval))
  return found


def source_of(eqn: Any, outer: str) -> str:
  """Returns where the user wrote an equation, as `kernel.py:12`.

  Args:
    eqn: The equation.
    outer: The answer for what JAX itself has written, which has no traceback
      but its own: the source of the equation around it.
  """
  from jax._src import source_info_util  # pylint: disable=g-import-not-at-top

  frame = source_info_util.user_frame(eqn.source_info.traceback)
  if frame is None:
    return outer
  return f"{os.path.basename(frame.file_name)}:{frame.start_line}"
