"""What a tile must satisfy so that TMA can move it and a warpgroup read it."""

from __future__ import annotations

import jax.numpy as jnp

# CUDA driver API, cuTensorMapEncodeTiled: a box has at most 256 elements a
# dimension and rows in whole multiples of 16 bytes; the box starts in shared
# memory at a multiple of 128 bytes.
_MAX_BOX_DIM = 256
_ROW_BYTES = 16
_SMEM_ALIGNMENT_BYTES = 128
_WARPGROUP_THREADS = 128


def check_tile(tile, dtype, *, num_blocks: int = 1) -> tuple[int, int]:
  """Checks the shape of a tile, and returns it as two Python integers.

  Args:
    tile: Rows and columns of one tile, in elements.
    dtype: Element type; float32, bfloat16 or float16.
    num_blocks: How many blocks share one multicast load of the tile; each of
      them loads `rows / num_blocks` rows for all.

  Returns:
    `(rows, cols)`.

  Raises:
    ValueError: If TMA could not move the tile, or if the 128 threads of a
      warpgroup could not share it evenly.
  """
  if jnp.dtype(dtype) not in map(
      jnp.dtype, (jnp.float32, jnp.bfloat16, jnp.float16)
  ):
    raise ValueError(
        "Expected float32, bfloat16 or float16, got"
        f" dtype={jnp.dtype(dtype).name}"
    )
  try:
    rows, cols = (int(dim) for dim in tile)
  except (TypeError, ValueError):
    raise ValueError(f"Expected (rows, cols), got {tile=}") from None
  itemsize = jnp.dtype(dtype).itemsize
  if not (1 <= rows <= _MAX_BOX_DIM and 1 <= cols <= _MAX_BOX_DIM):
    raise ValueError(
        f"Expected 1 to {_MAX_BOX_DIM} rows and columns, got {tile=}"
    )
  if cols * itemsize % _ROW_BYTES:
    raise ValueError(
        f"Expected rows of a multiple of {_ROW_BYTES} bytes, got {tile=} of"
        f" {cols * itemsize} bytes a row"
    )
  if rows % num_blocks:
    raise ValueError(
        f"Expected rows to be a multiple of {num_blocks}, the number of blocks"
        f" that share the load, got {tile=}"
    )
  if rows // num_blocks * cols * itemsize % _SMEM_ALIGNMENT_BYTES:
    raise ValueError(
        f"Expected each load to fill a multiple of {_SMEM_ALIGNMENT_BYTES}"
        f" bytes, got {tile=} loaded by {num_blocks} block(s)"
    )
  if rows * cols % _WARPGROUP_THREADS:
    raise ValueError(
        f"Expected a multiple of {_WARPGROUP_THREADS} elements, one or more"
        f" for every thread of a warpgroup, got {tile=}"
    )
  return rows, cols


def check_count(**counts: int) -> None:
  """Raises ValueError unless every given count is a positive integer."""
  for name, count in counts.items():
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
      raise ValueError(f"Expected {name} to be at least 1, got {name}={count}")
