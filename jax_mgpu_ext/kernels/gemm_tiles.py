"""What the two versions of the Hopper GEMM share: all but the ring.

The configuration, which tiles a block computes in which order, how a finished
tile is stored, and the launch.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import itertools
import math
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from jax_mgpu_ext.kernels.tiles import check_count

# Registers of a producer's CUDA thread; the consumers get the rest of the 64 Ki
# of a multiprocessor (PTX ISA, setmaxnreg: a multiple of 8, 24 to 256).
PRODUCER_REGISTERS = 40
CONSUMER_REGISTERS = 232
# Multiprocessors of an H100 SXM, where there is no GPU to ask.
_MULTIPROCESSORS = 132
_FP8 = (jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2))
_DTYPES = (jnp.dtype(jnp.float16), jnp.dtype(jnp.bfloat16), *_FP8)
_OUT_DTYPES = (*_DTYPES[:2], jnp.dtype(jnp.float32))
# Mosaic keeps the phases of one barrier array in the bits of an int32.
_MAX_STAGES = 32
_DIMENSIONS = ("grid_minor_dim", "wg_dimension", "cluster_dimension")
# wgmma takes 64 rows at a time, and at most 256 columns in multiples of 8 (PTX
# ISA, "Matrix shape" of wgmma).
_WGMMA_M = 64
_WGMMA_N = 8
_MAX_WGMMA_N = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmConfig:
  """What can be tuned.

  Attributes:
    tile_m: Rows of the output tile of one consumer.
    tile_n: Its columns.
    tile_k: Length of a step along K.
    num_stages: Stages of the ring, 1 to 32.
    epilogue_tile_m: Rows of the part of the tile that is stored at once; None:
      all.
    epilogue_tile_n: Its columns; None: all.
    grid_minor_dim: "m" or "n": along which tiles come first.
    grid_tile_width: How many tiles along it, before the path turns.
    wg_dimension: "m" or "n": along which the consumers share a tile.
    cluster_dimension: "m" or "n": along which two blocks make a cluster; None:
      each block is on its own.
  """

  tile_m: int = 128
  tile_n: int = 128
  tile_k: int = 64
  num_stages: int = 4
  epilogue_tile_m: int | None = 64
  epilogue_tile_n: int | None = 64
  grid_minor_dim: str = "n"
  grid_tile_width: int = 1
  wg_dimension: str = "n"
  cluster_dimension: str | None = None

  def __post_init__(self):
    put = lambda name, value: object.__setattr__(self, name, value)
    for dim in "mn":
      if getattr(self, f"epilogue_tile_{dim}") is None:
        put(f"epilogue_tile_{dim}", getattr(self, f"tile_{dim}"))
    check_count(**{
        field.name: getattr(self, field.name)
        for field in dataclasses.fields(self)
        if field.name not in _DIMENSIONS
    })
    if self.num_stages > _MAX_STAGES:
      raise ValueError(
          f"Expected at most {_MAX_STAGES} stages, got"
          f" num_stages={self.num_stages}"
      )
    for name in _DIMENSIONS:
      value = getattr(self, name)
      if value not in ("m", "n") and (name, value) != (
          "cluster_dimension", None
      ):
        raise ValueError(f"Expected 'm' or 'n', got {name}={value!r}")
    if self.tile_m % _WGMMA_M:
      raise ValueError(
          f"Expected tile_m in multiples of {_WGMMA_M}, got"
          f" tile_m={self.tile_m}"
      )
    if self.tile_n % _WGMMA_N or self.tile_n > _MAX_WGMMA_N:
      raise ValueError(
          f"Expected tile_n in multiples of {_WGMMA_N}, at most"
          f" {_MAX_WGMMA_N}, got tile_n={self.tile_n}"
      )
    for dim in "mn":
      whole = getattr(self, f"tile_{dim}")
      part = getattr(self, f"epilogue_tile_{dim}")
      least = _WGMMA_M if dim == "m" else _WGMMA_N
      if whole % part or part % least:
        raise ValueError(
            f"Expected epilogue_tile_{dim} in multiples of {least} that divide"
            f" tile_{dim}={whole}, got epilogue_tile_{dim}={part}"
        )

  @property
  def block_tile(self) -> tuple[int, int]:
    """Rows and columns of the output tile of a block, of both consumers."""
    return self._times_two_along(self.wg_dimension, self.tile_m, self.tile_n)

  @property
  def cluster_tile(self) -> tuple[int, int]:
    """Rows and columns of the output tile of a cluster."""
    return self._times_two_along(self.cluster_dimension, *self.block_tile)

  @property
  def cluster_size(self) -> int:
    """Blocks of a cluster."""
    return 1 if self.cluster_dimension is None else 2

  @property
  def num_parts(self) -> int:
    """How many parts of the tile a consumer has in SMEM at a time.

    It goes through them in turn, from tile to tile, so they divide the tile's.
    """
    area = self.epilogue_tile_m * self.epilogue_tile_n
    return 1 if self.tile_m * self.tile_n // area % 2 else 2

  @staticmethod
  def _times_two_along(dimension, m, n):
    return m * (1 + (dimension == "m")), n * (1 + (dimension == "n"))


def for_each_tile(m: int, n: int, k: int, config: GemmConfig):
  """Returns a decorator that runs a function for each tile of this block.

  The function gets the rows and the columns of the block's output tile, as
  slices, and the number of the first step of that tile.
  """
  shape = _num_tiles(m, n, config)

  def decorate(body):

    @plgpu.nd_loop((shape[0] * shape[1],), collective_axes="cluster")
    def _tile(loop):
      at = [0, 0]
      if shape != (1, 1):
        # For one tile, its branch that is not taken divides by zero; compiling
        # that for the CPU, in interpret mode, ends JAX 0.10.2 with a SIGFPE.
        at = list(plgpu.planar_snake(
            loop.index[0],
            shape,
            "mn".index(config.grid_minor_dim),
            config.grid_tile_width,
        ))
      if config.cluster_dimension is not None:
        dim = "mn".index(config.cluster_dimension)
        at[dim] = at[dim] * 2 + lax.axis_index("block")
      rows, cols = (
          pl.ds(index * size, size)
          for index, size in zip(at, config.block_tile)
      )
      body(rows, cols, loop.local_index * (k // config.tile_k))

  return decorate


def num_steps(m: int, n: int, k: int, config: GemmConfig) -> jax.Array:
  """Returns how many steps this block makes in all its tiles."""
  rows, cols = _num_tiles(m, n, config)
  num_clusters = lax.axis_size("cluster")
  last = rows * cols - 1 - lax.axis_index("cluster")
  return (lax.div(last, num_clusters) + 1) * (k // config.tile_k)


def share_of(consumer: jax.Array, config: GemmConfig) -> tuple[Any, Any]:
  """Returns which rows and columns of the block's tile a consumer computes."""
  if config.wg_dimension == "m":
    return pl.ds(consumer * config.tile_m, config.tile_m), slice(None)
  return slice(None), pl.ds(consumer * config.tile_n, config.tile_n)


def store_tile(tile: jax.Array, parts: Any, y: Any, config: GemmConfig) -> None:
  """Stores a consumer's tile, part by part by TMA; does not wait for the end.

  Args:
    tile: The tile, in registers.
    parts: SMEM of `config.num_parts` parts, which belongs to the consumer.
    y: Where it goes, in GMEM.
    config: What can be tuned.
  """
  size_m, size_n = config.epilogue_tile_m, config.epilogue_tile_n
  corners = itertools.product(
      range(0, config.tile_m, size_m), range(0, config.tile_n, size_n)
  )
  for index, (row, col) in enumerate(corners):
    part = parts.at[index % config.num_parts]
    at = slice(row, row + size_m), slice(col, col + size_n)
    # The part is free when at most the stores of the others are under way.
    plgpu.wait_smem_to_gmem(config.num_parts - 1, wait_read_only=True)
    part[...] = tile[at].astype(y.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(part, y.at[at])


def launch(
    body: Callable[..., None],
    scratch_types: Any,
    *,
    m: int,
    n: int,
    config: GemmConfig,
    out_dtype: Any,
    num_clusters: int | None,
    interpret: Any,
) -> Callable[[jax.Array, jax.Array], jax.Array]:
  """Returns the jitted function that launches a body of the GEMM."""
  num_tiles = math.prod(_num_tiles(m, n, config))

  @jax.jit
  def hopper_gemm(a, b):
    # Asked while it is traced: it may be traced for a GPU that is not there.
    multiprocessors = getattr(jax.devices()[0], "core_count", None)
    at_a_time = (multiprocessors or _MULTIPROCESSORS) // config.cluster_size
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((m, n), out_dtype),
        scratch_types=scratch_types,
        grid=(num_clusters or min(at_a_time, num_tiles),),
        grid_names=("cluster",),
        cluster=(config.cluster_size,),
        cluster_names=("block",),
        num_threads=3,
        thread_name="warpgroup",
        interpret=interpret,
        # Not the default of JAX 0.10.2.
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
    )(a, b)

  return hopper_gemm


def out_dtype_of(dtype: Any, out_dtype: Any = None) -> Any:
  """Returns the element type of the output."""
  if out_dtype is not None:
    return jnp.dtype(out_dtype)
  return jnp.dtype(jnp.bfloat16 if jnp.dtype(dtype) in _FP8 else dtype)


def check_problem(
    *, m, n, k, config, dtype, out_dtype, b_k_major, num_clusters
) -> None:
  """Checks that shapes, types and configuration fit each other.

  Raises:
    ValueError: They do not.
  """
  check_count(m=m, n=n, k=k)
  if num_clusters is not None:
    check_count(num_clusters=num_clusters)
  dtype = jnp.dtype(dtype)
  for name, one, legal in (
      ("dtype", dtype, _DTYPES),
      ("out_dtype", out_dtype_of(dtype, out_dtype), _OUT_DTYPES),
  ):
    if one not in legal:
      raise ValueError(
          f"Expected one of {', '.join(d.name for d in legal)}, got"
          f" {name}={one.name}"
      )
  if dtype in _FP8 and not b_k_major:
    raise ValueError(
        f"Expected b_k_major=True, since wgmma takes {dtype.name} only K-major,"
        " got b_k_major=False"
    )
  cluster_m, cluster_n = config.cluster_tile
  for name, size, tile in (
      ("m", m, cluster_m), ("n", n, cluster_n), ("k", k, config.tile_k)
  ):
    if size % tile:
      raise ValueError(
          f"Expected {name} to be a multiple of {tile}, the tile of a cluster,"
          f" got {name}={size}"
      )
  if num_clusters is not None and num_clusters > math.prod(
      _num_tiles(m, n, config)
  ):
    raise ValueError(
        "Expected at most as many clusters as tiles,"
        f" {math.prod(_num_tiles(m, n, config))}, got {num_clusters=}"
    )
  # wgmma of Mosaic wants a swizzle, and one of 16 bytes is none.
  row = config.tile_k * dtype.itemsize
  swizzle = plgpu.find_swizzle(row * 8) if row % 16 == 0 else 0
  if swizzle <= 16:
    raise ValueError(
        f"Expected tile_k in multiples of {32 // dtype.itemsize}, rows of 32"
        f" bytes, got tile_k={config.tile_k} of {dtype.name}"
    )
  if not b_k_major and config.tile_n % (swizzle // dtype.itemsize):
    raise ValueError(
        f"Expected tile_n in multiples of {swizzle // dtype.itemsize}, as"
        f" tile_k={config.tile_k} makes rows of {swizzle} bytes, got"
        f" tile_n={config.tile_n}"
    )


def _num_tiles(m: int, n: int, config: GemmConfig) -> tuple[int, int]:
  """Returns how many tiles of a cluster the output has along M and N."""
  cluster_m, cluster_n = config.cluster_tile
  return m // cluster_m, n // cluster_n
