"""Checks a kernel's mesh, and its cluster barriers against the mesh."""

from __future__ import annotations

from collections.abc import Hashable
import functools
import math
import sys
from typing import Any

from jax_mgpu_ext._src import avals
from jax_mgpu_ext._src import composites
from jax_mgpu_ext._src import errors
from jax_mgpu_ext._src import spec_text
from jax_mgpu_ext._src.hooks import barrier_constructors
from jax_mgpu_ext._src.hooks import contract

# The largest cluster that a GPU accepts: 8 thread blocks portably, 16 with
# cudaFuncAttributeNonPortableClusterSizeAllowed (CUDA C++ Programming Guide,
# "Thread Block Clusters", and the Hopper Tuning Guide).
MAX_CLUSTER_SIZE = 16

_MESH = contract.Target(
    module=contract.MOSAIC_CORE, name="Mesh.__post_init__"
)
_RESOLVE = contract.Target(
    module="jax._src.pallas.mosaic_gpu.lowering", name="_resolve_cluster_axis"
)


def _check_dims_are_sequences(mesh: Any) -> None:
  """Checks, before JAX takes their length, that dimensions are sequences."""
  for name in ("grid", "cluster"):
    dims = getattr(mesh, name)
    if not hasattr(dims, "__len__") or isinstance(dims, str):
      size = contract.as_integer(dims)
      raise errors.MeshSizeError(
          f"{name} must be a tuple of integers, got"
          f" {name}={spec_text.describe(dims)}",
          code="MGPU033",
          hint=f"Write {name}=({'2' if size is None else size},)",
      )


def _check_mesh(mesh: Any) -> None:
  """Checks sizes and names of a mesh.

  Raises:
    MeshSizeError: A dimension is not an integer.
    SpecError: A dimension is out of range, the cluster is too large, or two
      axes have one name.
  """
  for name, least in (("grid", 0), ("cluster", 1)):
    dims = getattr(mesh, name)
    for dim in dims:
      size = contract.as_integer(dim)
      # Symbolic sizes are no integers either; they are JAX's own business.
      if size is None and isinstance(dim, (float, complex, str, type(None))):
        raise errors.MeshSizeError(
            f"{name} must consist of integers, got {name}={dims}",
            code="MGPU033", hint=f"Write {name}=(2,)",
        )
      if size is not None and size < least:
        raise errors.SpecError(
            f"every size in {name} must be at least {least}, got {name}={dims}",
            code="MGPU033", hint=f"Leave {name} out to have none",
        )
  if isinstance(mesh.num_threads, (float, complex, str)):
    raise errors.MeshSizeError(
        "num_threads must be an integer, got"
        f" num_threads={spec_text.describe(mesh.num_threads)}",
        code="MGPU033", hint="A thread is one warpgroup: write num_threads=2",
    )
  sizes = [contract.as_integer(dim) or 1 for dim in mesh.cluster]
  if math.prod(sizes) > MAX_CLUSTER_SIZE:
    raise errors.SpecError(
        f"a cluster has at most {MAX_CLUSTER_SIZE} thread blocks (8 without the"
        f" non-portable attribute), got {math.prod(sizes)} in"
        f" cluster={mesh.cluster}",
        code="MGPU031", hint="Move the rest of the blocks into the grid",
    )
  seen: dict[Any, str] = {}
  threads = () if mesh.thread_name is None else (mesh.thread_name,)
  for kind, names in (
      ("grid_names", mesh.grid_names),
      ("cluster_names", mesh.cluster_names),
      ("thread_name", threads),
  ):
    for name in names:
      if not isinstance(name, Hashable):
        continue  # JAX complains when, and if, it looks the name up.
      if name in seen:
        raise errors.SpecError(
            "every axis of a mesh needs its own name, got"
            f" {spec_text.describe(name)} in"
            f" {seen[name]} and in {kind}",
            code="MGPU032",
            hint="Rename one of them; an axis index could mean either",
        )
      seen[name] = kind


def check_barriers(
    scratch: Any,
    root: str,
    cluster: dict[Any, int],
    arrivals_per_thread: int,
) -> None:
  """Checks the barriers of a scratch tree against the mesh.

  Args:
    scratch: A pytree of specs.
    root: Its name in error messages.
    cluster: Name -> size of every cluster axis.
    arrivals_per_thread: How many arrivals Mosaic counts for the arrival of one
      Pallas thread at a local barrier (128 under Lane lowering, else 1).

  Raises:
    ClusterAxisError: A cluster barrier names an axis that is not there.
    SpecError: A count overflows the mbarrier.
  """

  def check(leaf):
    if avals.is_barrier(leaf):
      _check_barrier(leaf, cluster, arrivals_per_thread)

  items, _ = contract.scratch_items(scratch)
  if isinstance(items, dict) and not all(isinstance(k, str) for k in items):
    return  # No names for keywords, as JAX is about to say.
  avals.check_specs(check, items, root)


def check_composites(scratch: Any, root: str, mesh: composites.Mesh) -> None:
  """Checks the composite specs of a scratch tree against the mesh.

  Args:
    scratch: A pytree of specs.
    root: Its name in error messages.
    mesh: What of the kernel can use them.

  Raises:
    SpecError: What a composite's own check raises, with its path.
  """
  items, _ = contract.scratch_items(scratch)
  if isinstance(items, dict) and not all(isinstance(k, str) for k in items):
    return  # No names for keywords, as JAX is about to say.
  for path, spec in composites.find(items):
    check = getattr(type(spec), composites.CHECK_MESH, None)
    if check is None:
      continue
    try:
      check(spec, mesh)
    except errors.SpecError as e:
      import jax  # pylint: disable=g-import-not-at-top

      e.path = root + jax.tree_util.keystr(path)
      raise


def _check_barrier(
    spec: Any, cluster: dict[Any, int], arrivals_per_thread: int
) -> None:
  dtype = avals.ref_aval(spec).dtype
  factor = arrivals_per_thread
  if avals.is_cluster_barrier(spec):
    groups = [
        axis if isinstance(axis, tuple) else (axis,)
        for axis in dtype.collective_axes
    ]
    for axis in contract.flat_axes(dtype.collective_axes):
      if axis not in cluster:
        raise spec_text.unknown_axis_error(
            axis, cluster, dtype.collective_axes, spec
        )
    # Every slice along an axis arrives, its own block counted once: the count
    # that Mosaic initialises (`CollectiveBarrierRef.initialize`).
    sizes = [math.prod(cluster[axis] for axis in group) for group in groups]
    if None in map(contract.as_integer, sizes):
      return  # Symbolic sizes are known when the kernel is compiled.
    factor = 1 + sum(size - 1 for size in sizes)
  elif dtype.orders_tensor_core:
    factor = 1
  limit = barrier_constructors.MAX_ARRIVALS
  if dtype.num_arrivals * factor > limit:
    raise errors.SpecError(
        f"num_arrivals={dtype.num_arrivals} becomes"
        f" {dtype.num_arrivals * factor} arrivals in this kernel (times"
        f" {factor}), more than the {limit} that an mbarrier counts",
        code="MGPU025", spec=spec,
        hint=f"At most num_arrivals={limit // factor} fits here",
    )


def _use_python_integers(mesh: Any) -> None:
  """Turns NumPy sizes into Python ones: JAX's trace asserts that they are."""
  for name in ("grid", "cluster"):
    dims = tuple(
        dim if contract.as_integer(dim) is None else contract.as_integer(dim)
        for dim in getattr(mesh, name)
    )
    object.__setattr__(mesh, name, dims)
  if (num_threads := contract.as_integer(mesh.num_threads)) is not None:
    object.__setattr__(mesh, "num_threads", num_threads)


def _wrap_mesh(original):
  @functools.wraps(original)
  def __post_init__(self):
    _check_dims_are_sequences(self)
    original(self)
    _check_mesh(self)
    _use_python_integers(self)

  return __post_init__


def _wrap_kernel(original):
  core = sys.modules[contract.MOSAIC_CORE]
  lane = core.mgpu.LoweringSemantics.Lane
  default_params = core.CompilerParams()

  @functools.wraps(original)
  def kernel(*args, **kwargs):
    result = original(*args, **kwargs)
    # After JAX's own checks of the mesh, and outside of any trace: a trace may
    # be reused for another mesh (0.11.0 to 0.11.2) and then checks nothing.
    cluster = dict(
        zip(kwargs.get("cluster_names", ()), kwargs.get("cluster", ()))
    )
    params = kwargs.get("compiler_params")
    if params is None:
      params = default_params
    semantics = getattr(params, "lowering_semantics", None)
    for root in ("scratch_types", "scratch_shapes"):
      if root in kwargs and not contract.is_not_specified(kwargs[root]):
        check_barriers(
            kwargs[root], root, cluster, 128 if semantics == lane else 1
        )
        mesh = composites.Mesh(
            num_threads=kwargs.get("num_threads") or 1, axes=cluster
        )
        check_composites(kwargs[root], root, mesh)
    return result

  return kernel


def _wrap_resolve(original):
  @functools.wraps(original)
  def _resolve_cluster_axis(axis_names, axis_name):
    try:
      return original(axis_names, axis_name)
    except LookupError as e:
      raise errors.ClusterAxisError(
          str(e), code="MGPU030",
          hint=(
              f"{axis_name!r} is none of the kernel's cluster_names; pass"
              " cluster=... and cluster_names=... to plgpu.kernel"
          ),
      ) from e

  return _resolve_cluster_axis


def _apply(ledger) -> None:
  ledger.replace(_MESH, _wrap_mesh)
  ledger.replace(contract.KERNEL, _wrap_kernel)
  ledger.replace(_RESOLVE, _wrap_resolve)


HOOK = contract.Hook(
    slug="cluster_axes",
    why=(
        "Clusters that no GPU can launch, axes that share a name, and barriers"
        " over axes that the cluster does not have are refused by plgpu.kernel"
    ),
    codes=("MGPU025", "MGPU030", "MGPU031", "MGPU032", "MGPU033"),
    targets=(_MESH, contract.KERNEL, _RESOLVE),
    apply=_apply,
    native=contract.Target(module=contract.MOSAIC_CORE, name="_check_barriers"),
)
