"""Makes the grid a part of the trace cache's key, as JAX 0.12.0 does.

In JAX 0.11.0 to 0.11.2 a kernel function that was traced for one grid, and asks
for its size, is reused for another grid: the caches know functions and avals,
not the grid. Grids of 2, 5, 3 and 4 programs give 2, 5, 5 and 5.
"""

from __future__ import annotations

import contextlib
import functools
import sys

from jax_mgpu_ext._src.hooks import contract

_GRID_ENV = contract.Target(
    module=contract.PALLAS_CORE, name="tracing_grid_env"
)


def _wrap_tracing_grid_env(original):
  # A context whose value is a part of the key of every trace cache.
  grid_key = sys.modules["jax._src.config"].make_user_context()

  @contextlib.contextmanager
  @functools.wraps(original)
  def tracing_grid_env(grid, mapped_dims):
    key = (tuple(grid), tuple(mapped_dims))
    with grid_key(key), original(grid, mapped_dims):
      yield

  return tracing_grid_env


HOOK = contract.Hook(
    slug="grid_trace_key",
    why=(
        "A kernel function that is used with another grid is traced again,"
        " instead of giving the results of the first grid"
    ),
    codes=(),
    targets=(_GRID_ENV,),
    apply=lambda ledger: ledger.replace(_GRID_ENV, _wrap_tracing_grid_env),
    since="0.11.0",
    until="0.12.0",
    native=contract.Target(module=contract.PALLAS_CORE, name="_grid_trace_key"),
)
