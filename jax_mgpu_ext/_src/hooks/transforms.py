"""Checks shapes, tilings and swizzles of memory refs."""

from __future__ import annotations

from collections.abc import Sequence
import functools
import sys
from typing import Any

from jax_mgpu_ext._src import errors
from jax_mgpu_ext._src import spec_text
from jax_mgpu_ext._src.hooks import contract


def _target(name: str) -> contract.Target:
  return contract.Target(module=contract.MOSAIC_CORE, name=name)


_CALL = _target("MemorySpace.__call__")
_POST_INIT = _target("GPUMemoryRef.__post_init__")
_TILE = _target("TilingTransform.transform_type")
_SWIZZLE = _target("SwizzleTransform.transform_type")


def _check_shape(shape: Any, name: str) -> None:
  """Checks the shape of a memory ref, as far as its sizes are known.

  Raises:
    SpecTypeError: It is no sequence.
    SpecError: A size is negative.
  """
  if isinstance(shape, str) or not hasattr(shape, "__iter__"):
    size = contract.as_integer(shape)
    raise errors.SpecTypeError(
        f"the shape of a {name} ref must be a sequence of integers, got shape="
        f"{spec_text.describe(shape)}",
        code="MGPU051",
        hint=f"Write ({'128' if size is None else size},)",
    )
  # Sizes that are not integers, as symbolic ones, are JAX's own business.
  sizes = tuple(shape) if isinstance(shape, Sequence) else ()
  if any((contract.as_integer(size) or 0) < 0 for size in sizes):
    raise errors.SpecError(
        f"the shape of a {name} ref must not have negative sizes, got"
        f" shape={sizes}",
        code="MGPU051",
        hint="Memory refs have fixed sizes; there is no -1 for the rest",
    )


def _swapped_error(name: str, first: Any, second: Any) -> errors.SpecError:
  return errors.SpecTypeError(
      f"{name} takes the shape first and then the dtype, got"
      f" {spec_text.describe(first)}, {spec_text.describe(second)}",
      code="MGPU051",
      hint=f"Write plgpu.{name}({spec_text.describe(second)}, dtype)",
  )


def _check_tiling(tiling: Any, shape: tuple[int, ...]) -> None:
  """Checks that a tiling cuts a shape into whole tiles.

  Raises:
    SpecTypeError: The tiling is no sequence of integers.
    SpecError: A tile size is less than 1 (and a ZeroDivisionError, as in JAX).
    TilingError: The tiling has more dimensions than the shape, or a tile size
      does not divide its dimension.
  """
  if isinstance(tiling, str) or not isinstance(tiling, Sequence):
    raise errors.SpecTypeError(
        "a tiling must be a sequence of integers, got"
        f" tiling={spec_text.describe(tiling)}",
        code="MGPU053", hint="Write TilingTransform((8, 64))",
    )
  sizes = [contract.as_integer(size) for size in tiling]
  if None in sizes:
    raise errors.SpecTypeError(
        f"a tiling must consist of integers, got tiling={spec_text.describe(tuple(tiling))}",
        code="MGPU053", hint="Write TilingTransform((8, 64))",
    )
  if any(size < 1 for size in sizes):
    raise errors.spec_error_like(ZeroDivisionError)(
        f"tile sizes must be at least 1, got tiling={spec_text.describe(tuple(tiling))}",
        code="MGPU053", hint="Leave the transform out to have no tiles",
    )
  if len(sizes) > len(shape):
    raise errors.TilingError(
        f"a tiling of {len(sizes)} dimensions needs a ref of at least as many,"
        f" got tiling {tuple(tiling)} for shape {tuple(shape)}",
        code="MGPU050", hint="A tiling applies to the last dimensions",
    )
  tiled = tuple(shape)[len(shape) - len(sizes):]
  if any(dim % size for dim, size in zip(tiled, sizes)):
    raise errors.TilingError(
        f"tiling {tuple(tiling)} must divide the last dimensions of shape"
        f" {tuple(shape)}",
        code="MGPU050",
        hint=f"Pad the ref to {_padded(shape, sizes)}, or choose other tiles",
    )


def _padded(shape: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
  first = len(shape) - len(sizes)
  tiled = (-(-dim // size) * size for dim, size in zip(shape[first:], sizes))
  return (*shape[:first], *tiled)


def _wrap_call(original):
  @functools.wraps(original)
  def __call__(self, *args, **kwargs):
    if args or "shape" in kwargs:
      shape = args[0] if args else kwargs["shape"]
      if len(args) > 1 and isinstance(args[1], (tuple, list)):
        raise _swapped_error(self.name, *args[:2])
      _check_shape(shape, self.name)
    return original(self, *args, **kwargs)

  return __call__


def _wrap_post_init(original):
  @functools.wraps(original)
  def __post_init__(self):
    name = getattr(self.memory_space, "name", str(self.memory_space))
    # Types of a higher level need not have a shape.
    _check_shape(getattr(self.inner_aval, "shape", ()), name)
    original(self)

  return __post_init__


def _wrap_tile(original):
  shaped_array = sys.modules["jax._src.core"].ShapedArray

  @functools.wraps(original)
  def transform_type(self, x):
    if isinstance(x, shaped_array) and x.shape is not None:
      _check_tiling(self.tiling, x.shape)
    return original(self, x)

  return transform_type


def _elements(swizzle: Any, aval: Any) -> Any:
  """Returns how many elements one swizzle is wide; `n` if that is not known."""
  bits = 8 * getattr(getattr(aval, "dtype", None), "itemsize", 0)
  return 8 * swizzle.swizzle // bits if bits else "n"


def _wrap_swizzle(original):
  @functools.wraps(original)
  def transform_type(self, x):
    try:
      return original(self, x)
    except errors.SpecError:
      raise
    except ValueError as e:
      raise errors.SpecError(
          str(e).rstrip("."), code="MGPU052", spec=self,
          hint=(
              "Tile the ref first, so that the last dimension is one swizzle"
              f" wide: transforms=(TilingTransform((8, {_elements(self, x)})),"
              f" SwizzleTransform({self.swizzle})), or take the swizzle from"
              " plgpu.find_swizzle"
          ),
      ) from e

  return transform_type


def _apply(ledger) -> None:
  ledger.replace(_CALL, _wrap_call)
  ledger.replace(_POST_INIT, _wrap_post_init)
  ledger.replace(_TILE, _wrap_tile)
  ledger.replace(_SWIZZLE, _wrap_swizzle)


HOOK = contract.Hook(
    slug="transforms",
    why=(
        "Shapes, tilings and swizzles that do not fit are refused in words,"
        " instead of by an empty assertion"
    ),
    codes=("MGPU050", "MGPU051", "MGPU052", "MGPU053"),
    targets=(_CALL, _POST_INIT, _TILE, _SWIZZLE),
    apply=_apply,
    native=contract.Target(module=contract.MOSAIC_CORE, name="_check_tiling"),
)
