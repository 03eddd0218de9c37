"""SMEM with the tiling and swizzle that TMA and the tensor cores want."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from jax_mgpu_ext._src import errors
from jax_mgpu_ext._src import spec_text

# Bytes of one row of a swizzled tile; 16 is no swizzle at all (PTX ISA, "Swizzling
# modes" of tensor copies).
SWIZZLES = (128, 64, 32, 16)
# Rows of a tile: the core matrix of wgmma and tcgen05 (PTX ISA, "Core matrix").
_ROWS = 8


def TiledSMEM(  # pylint: disable=invalid-name
    shape: Sequence[int], dtype: Any, *, swizzle: int | str = "auto"
):
  """Returns a memory ref in SMEM, tiled for TMA, wgmma and tcgen05.

  The last two dimensions are cut into tiles of 8 rows, one swizzle wide, which is
  what `plgpu.copy_gmem_to_smem` writes and the tensor cores read. It is the same
  object as a `plgpu.SMEM` with these transforms:

    TiledSMEM((128, 64), jnp.float16)
    plgpu.SMEM((128, 64), jnp.float16, transforms=(
        plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)))

  Args:
    shape: Its shape, of two dimensions or more.
    dtype: Its element type.
    swizzle: Width of a tile in bytes: 128, 64, 32, or 16 for none; "auto" takes
      the largest that divides the last dimension.

  Raises:
    SpecError: No swizzle fits, or not the one that was asked for.
  """
  shape = tuple(shape)
  bits = jnp.dtype(dtype).itemsize * 8
  try:
    bits = jnp.finfo(dtype).bits if jnp.issubdtype(dtype, jnp.floating) else (
        jnp.iinfo(dtype).bits if jnp.issubdtype(dtype, jnp.integer) else bits
    )
  except ValueError:
    pass
  name = f"TiledSMEM({shape}, {jnp.dtype(dtype).name})"
  if len(shape) < 2 or shape[-2] % _ROWS:
    raise errors.SpecError(
        f"expected at least two dimensions, the last but one a multiple of"
        f" {_ROWS}, got {name}",
        code="MGPU122",
        hint=(
            "Write plgpu.SMEM for a ref without tiles"
            if len(shape) < 2
            else f"Pad it to {-(-shape[-2] // _ROWS) * _ROWS} rows"
        ),
    )
  legal = [s for s in SWIZZLES if not (shape[-1] * bits) % (s * 8)]
  if not legal:
    raise errors.SpecError(
        f"no swizzle fits: a row of {shape[-1]} elements has"
        f" {shape[-1] * bits / 8:g} bytes, which no width of"
        f" {', '.join(map(str, SWIZZLES))} bytes divides, in {name}",
        code="MGPU122",
        hint=f"Make the last dimension a multiple of {128 // bits} elements",
    )
  if swizzle == "auto":
    swizzle = legal[0]
  elif swizzle not in legal:
    raise errors.SpecError(
        f"expected a swizzle of {', '.join(map(str, legal))} bytes for rows of"
        f" {shape[-1] * bits // 8} bytes, got swizzle="
        f"{spec_text.describe(swizzle)} in {name}",
        code="MGPU122", hint=f'Write swizzle={legal[0]}, or "auto"',
    )
  transforms = (plgpu.TilingTransform((_ROWS, swizzle * 8 // bits)),)
  if swizzle != SWIZZLES[-1]:
    transforms += (plgpu.SwizzleTransform(swizzle),)
  return plgpu.SMEM(shape, dtype, transforms=transforms)


def _like(array: Any, *, swizzle: int | str = "auto"):
  """Returns `TiledSMEM` of the shape and dtype of an array."""
  return TiledSMEM(array.shape, array.dtype, swizzle=swizzle)


TiledSMEM.like = _like
