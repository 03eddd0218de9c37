"""What the two versions of the Blackwell GEMM share: all but the rings.

The configuration, which tiles a cluster computes in which order, how a finished
tile is stored, and the launch.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from jax_mgpu_ext.kernels.tiles import check_count

# Rows of the accumulator of one block: lanes of TMEM.
_TILE_M = 128
_TMEM_COLUMNS = 512
# Multiprocessors of a B200, where there is no GPU to ask.
_MULTIPROCESSORS = 148


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmConfig:
  """How the product is cut up.

  Attributes:
    tile_m: Rows of `c` for one block and tile; 128.
    tile_n: Columns of `b` that one block loads; a multiple of 16. In a pair the
      tile of `c` has twice as many.
    tile_k: Columns of `a`, rows of `b`, in one step; a multiple of 16.
    num_stages: Stages of the ring in SMEM.
    num_accumulators: Accumulators in TMEM, of 512 columns together at most.
    collective: Whether two blocks share each MMA.
    epilogue_tile_n: Columns that are stored at a time; divides the tile's.
    grid_minor_dim: "m" or "n": along which tiles come first.
    grid_tile_width: How many tiles along it, before the path turns.
  """

  tile_m: int = _TILE_M
  tile_n: int = 128
  tile_k: int = 64
  num_stages: int = 4
  num_accumulators: int = 2
  collective: bool = True
  epilogue_tile_n: int = 64
  grid_minor_dim: str = "n"
  grid_tile_width: int = 1

  def __post_init__(self):
    given = dataclasses.asdict(self)
    check_count(**{
        name: value for name, value in given.items()
        if name not in ("collective", "grid_minor_dim")
    })
    if self.tile_m != _TILE_M:
      raise ValueError(f"Expected tile_m to be {_TILE_M}, got {self.tile_m}")
    for name in ("tile_n", "tile_k", "epilogue_tile_n"):
      if given[name] % 16:
        raise ValueError(
            f"Expected {name} to be a multiple of 16, got {name}={given[name]}"
        )
    if self.mma_n > 256:
      raise ValueError(
          "Expected an MMA of at most 256 columns, got"
          f" tile_n={self.tile_n} and collective={self.collective}"
      )
    if self.num_accumulators * self.mma_n > _TMEM_COLUMNS:
      raise ValueError(
          f"Expected accumulators of {_TMEM_COLUMNS} columns together, got"
          f" num_accumulators={self.num_accumulators} of {self.mma_n}"
      )
    if self.mma_n % self.epilogue_tile_n:
      raise ValueError(
          f"Expected epilogue_tile_n to divide {self.mma_n}, got"
          f" epilogue_tile_n={self.epilogue_tile_n}"
      )
    if self.grid_minor_dim not in ("m", "n"):
      raise ValueError(
          "Expected grid_minor_dim to be m or n, got"
          f" grid_minor_dim={self.grid_minor_dim}"
      )

  @property
  def num_blocks(self) -> int:
    """Blocks of a cluster."""
    return 2 if self.collective else 1

  @property
  def mma_m(self) -> int:
    """Rows of `c` that a cluster computes at a time."""
    return self.num_blocks * self.tile_m

  @property
  def mma_n(self) -> int:
    """Columns of `c` that a cluster computes at a time."""
    return self.num_blocks * self.tile_n


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
  """The tiles of one product, and who computes which.

  Attributes:
    m: Tiles along the rows of `c`.
    n: Tiles along its columns.
    k: Steps for each tile.
    clusters: Clusters that share them.
  """

  m: int
  n: int
  k: int
  clusters: int

  def of_cluster(self, cluster: jax.Array) -> jax.Array:
    """Returns how many tiles a cluster computes."""
    return lax.div(
        self.m * self.n - cluster + self.clusters - 1, jnp.int32(self.clusters)
    )

  def index(
      self, tile: jax.Array, cluster: jax.Array, config: GemmConfig
  ) -> tuple[jax.Array, jax.Array]:
    """Returns the row and column of a cluster's tile, counted in tiles.

    Tiles go back and forth in strips, `grid_tile_width` wide, so that those
    that are computed at a time share operands in the L2 cache; as
    `plgpu.planar_snake` does, which JAX 0.10.2 cannot lower in one warp.
    """
    by_rows = config.grid_minor_dim == "n"
    minor, major = (self.n, self.m) if by_rows else (self.m, self.n)
    full_width = min(config.grid_tile_width, minor)
    number = tile * self.clusters + cluster
    strip = lax.div(number, jnp.int32(full_width * major))
    within = number - strip * (full_width * major)
    # The last strip may be narrower.
    width = lax.min(minor - strip * full_width, jnp.int32(full_width))
    along = lax.div(within, width)
    back = lax.rem(strip, jnp.int32(2))
    at_major = along + back * (major - 1 - 2 * along)
    at_minor = strip * full_width + within - along * width
    return (at_major, at_minor) if by_rows else (at_minor, at_major)


def store(values, c, c_smem, rows, first_col, config, *, release) -> None:
  """Stores an accumulator, piece by piece.

  Args:
    values: The accumulator, in TMEM.
    c: The output, in GMEM.
    c_smem: Two pieces, in SMEM.
    rows: The slice of the rows of `c`.
    first_col: The first column in `c`.
    config: How the product is cut up.
    release: Called after the last load from the accumulator.
  """
  pieces = config.mma_n // config.epilogue_tile_n
  if pieces % 2:
    # The last tile ended with the half that this one begins with.
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
  for piece in range(pieces):
    col = piece * config.epilogue_tile_n
    half = c_smem.at[piece % 2]
    half[...] = plgpu.async_load_tmem(
        values.at[:, pl.ds(col, config.epilogue_tile_n)]
    ).astype(c.dtype)
    if piece == pieces - 1:
      release()
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(
        half, c.at[rows, pl.ds(first_col + col, config.epilogue_tile_n)]
    )
    plgpu.wait_smem_to_gmem(1, wait_read_only=True)


def launch(
    body, scratch_types, tiles: Tiles, config: GemmConfig, dtype, interpret
) -> Callable[[jax.Array, jax.Array], jax.Array]:
  """Returns the jitted function that launches a kernel body."""
  shape = tiles.m * config.mma_m, tiles.n * config.mma_n
  return jax.jit(
      plgpu.kernel(
          body,
          out_type=jax.ShapeDtypeStruct(shape, dtype),
          scratch_types=scratch_types,
          grid=(tiles.clusters,),
          grid_names=("cluster",),
          cluster=(config.num_blocks,),
          cluster_names=("x",),
          num_threads=2,
          thread_name="warpgroup",
          compiler_params=plgpu.CompilerParams(
              lowering_semantics=plgpu.LoweringSemantics.Warpgroup
          ),
          interpret=interpret,
      )
  )


def tiles_of(m, n, k, dtype, config: GemmConfig, num_clusters) -> Tiles:
  """Checks the arguments of `make_kernel`, and cuts the product up.

  Raises:
    ValueError: If shapes, type and configuration do not fit each other.
  """
  if jnp.dtype(dtype) not in map(jnp.dtype, (jnp.float16, jnp.bfloat16)):
    raise ValueError(
        f"Expected float16 or bfloat16, got dtype={jnp.dtype(dtype).name}"
    )
  sizes = dict(m=m, n=n, k=k)
  check_count(**sizes)
  tile = dict(m=config.mma_m, n=config.mma_n, k=config.tile_k)
  for name, size in sizes.items():
    if size % tile[name]:
      raise ValueError(
          f"Expected {name} to be a multiple of {tile[name]}, got {name}={size}"
      )
  counts = {name: sizes[name] // tile[name] for name in sizes}
  if num_clusters is None:
    device = jax.devices()[0]
    cores = getattr(device, "core_count", None) or _MULTIPROCESSORS
    num_clusters = min(cores // config.num_blocks, counts["m"] * counts["n"])
  check_count(num_clusters=num_clusters)
  if num_clusters > counts["m"] * counts["n"]:
    raise ValueError(
        "Expected at most one cluster for each of the"
        f" {counts['m'] * counts['n']} tiles, got {num_clusters=}"
    )
  return Tiles(**counts, clusters=num_clusters)
