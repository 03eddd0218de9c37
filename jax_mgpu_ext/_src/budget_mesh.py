"""The arguments that describe a mesh, checked: grid, cluster, threads."""

from __future__ import annotations

from collections.abc import Sequence
import operator
from typing import Any

from jax_mgpu_ext._src import budget_rows
from jax_mgpu_ext._src import errors
from jax_mgpu_ext._src import spec_text


def sizes(
    grid: Sequence[int], cluster: Sequence[int], num_threads: int | None
) -> tuple[tuple[int, ...], tuple[int, ...], int]:
  """Returns grid and cluster of integers, and the CUDA threads of a block.

  Raises:
    SpecError: One of them cannot be launched on any GPU.
  """
  count = 1
  if num_threads is not None:
    count = _size("num_threads", num_threads, 1, num_threads)
  return (
      _sizes("grid", grid, 0),
      _sizes("cluster", cluster, 1),
      count * budget_rows.THREADS_PER_WARPGROUP,
  )


def _sizes(name: str, dims: Any, least: int) -> tuple[int, ...]:
  if not isinstance(dims, (tuple, list)):
    raise errors.MeshSizeError(
        f"{name} must be a tuple of integers, got"
        f" {name}={spec_text.describe(dims)}",
        code="MGPU033", hint=f"Write {name}=(2,)",
    )
  return tuple([_size(name, dim, least, dims) for dim in dims])


def _size(name: str, value: Any, least: int, dims: Any) -> int:
  is_mesh = isinstance(dims, (tuple, list))
  try:
    size = operator.index(value)
  except TypeError:
    kind = "consist of integers" if is_mesh else "be an integer"
    raise errors.MeshSizeError(
        f"{name} must {kind}, got {name}={spec_text.describe(dims)}",
        code="MGPU033", hint=f"Write {name}={'(2,)' if is_mesh else 2}",
    ) from None
  if size < least:
    every = "every size in " if is_mesh else ""
    raise errors.SpecError(
        f"{every}{name} must be at least {least}, got"
        f" {name}={spec_text.describe(dims)}",
        code="MGPU033", hint=f"Leave {name} out to have none",
    )
  return size


def check_number(name: str, value: Any, least: int) -> None:
  """Checks an argument that is a whole number.

  Raises:
    ValueError: It is none, or less than `least`.
  """
  if isinstance(value, bool) or not isinstance(value, int) or value < least:
    raise ValueError(
        f"expected a whole number from {least} on, got"
        f" {name}={spec_text.describe(value)}"
    )
