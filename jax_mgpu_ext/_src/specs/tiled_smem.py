"""SMEM with the tiling and swizzle that TMA and the tensor cores want."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
import operator
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from jax_mgpu_ext._src import avals
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

  TMA, wgmma and tcgen05 take all of it or any tiles of it; ordinary loads take
  multiples of 64 rows (JAX has no layout for fewer, see MGPU127).

  Args:
    shape: Its shape, of two dimensions or more.
    dtype: Its element type.
    swizzle: Width of a tile in bytes: 128, 64, 32, or 16 for none; "auto" takes
      the largest that divides the last dimension.

  Raises:
    SpecError: No swizzle fits, or not the one that was asked for.
  """
  shape = _as_shape(shape)
  dtype, bits = _as_dtype(dtype)
  name = f"TiledSMEM({shape}, {dtype.name})"
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
  if isinstance(swizzle, str) and swizzle == "auto":
    swizzle = legal[0]
  elif _as_integer(swizzle) not in legal:
    raise errors.SpecError(
        f"expected a swizzle of {', '.join(map(str, legal))} bytes for rows of"
        f" {shape[-1] * bits // 8} bytes, got swizzle="
        f"{spec_text.describe(swizzle)} in {name}",
        code="MGPU122", hint=f'Write swizzle={legal[0]}, or "auto"',
    )
  swizzle = int(swizzle)
  transforms = (plgpu.TilingTransform((_ROWS, swizzle * 8 // bits)),)
  if swizzle != SWIZZLES[-1]:
    transforms += (plgpu.SwizzleTransform(swizzle),)
  return plgpu.SMEM(shape, dtype, transforms=transforms)


def _as_integer(value: Any) -> int | None:
  """Returns an integer that is known now as an int, or None if it is none."""
  if isinstance(value, (bool, jax.core.Tracer)) or getattr(value, "ndim", 0):
    return None
  try:
    return operator.index(value)
  except Exception:  # pylint: disable=broad-exception-caught
    return None  # Symbolic dimensions have an exception of their own.


def _as_shape(shape: Any) -> tuple[int, ...]:
  """Returns a shape as a tuple of ints.

  Raises:
    SpecError: It is none.
  """
  dims = None
  if (
      isinstance(shape, Iterable)
      and not isinstance(shape, (str, bytes, dict, set, frozenset))
      and getattr(shape, "ndim", 1)
  ):
    dims = tuple(map(_as_integer, tuple(shape)))
  if dims is None or None in dims or min(dims, default=1) < 1:
    raise errors.SpecTypeError(
        "expected a tuple of sizes, each 1 or more, as the shape of a TiledSMEM,"
        f" got shape={spec_text.describe(shape)}",
        code="MGPU122",
        hint="Write TiledSMEM((128, 64), jnp.float16), with sizes that are known"
        " when the spec is made",
    )
  return dims


def _as_dtype(dtype: Any) -> tuple[Any, int]:
  """Returns a dtype, and the bits of an element.

  Raises:
    SpecError: It is none of numbers.
  """
  try:
    if dtype is None:
      raise TypeError("jnp.dtype(None) is float32")
    found = jnp.dtype(dtype)
    if jnp.issubdtype(found, jnp.floating):
      return found, jnp.finfo(found).bits
    if jnp.issubdtype(found, jnp.integer):
      return found, jnp.iinfo(found).bits
  except (TypeError, ValueError):
    pass
  raise errors.SpecTypeError(
      "expected a floating-point or an integer dtype of a TiledSMEM, got"
      f" dtype={spec_text.describe(dtype)}",
      code="MGPU122",
      hint="Write jnp.float16, say; plgpu.SMEM takes other types, without tiles",
  )


def _like(array: Any, *, swizzle: int | str = "auto"):
  """Returns `TiledSMEM` of the shape and dtype of an array.

  Args:
    array: Anything with a shape and a dtype: an array, a `jax.ShapeDtypeStruct`,
      another memory ref.
    swizzle: As of `TiledSMEM`.

  Raises:
    SpecError: It has none, or as of `TiledSMEM`.
  """
  if not spec_text.looks_like_array(array) or avals.is_barrier(array):
    raise errors.SpecTypeError(
        "expected something with a shape and a dtype in TiledSMEM.like, got"
        f" {spec_text.describe(array)}",
        code="MGPU122", hint="Pass an array, or a jax.ShapeDtypeStruct",
    )
  return TiledSMEM(array.shape, array.dtype, swizzle=swizzle)


TiledSMEM.like = _like
