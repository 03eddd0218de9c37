"""Reference kernels: cluster kernels whose barrier protocols are explained.

One module a kernel, each with the same three functions: `make_kernel` builds a
jitted callable (pass `interpret=` to run it without a GPU), `reference` is what
it must compute, `make_inputs` draws arguments for it. `mgpu-ext check` without
arguments runs them all. Words: a producer fills a stage and makes it `full`, a
consumer drains it and makes it `empty`.

  peer_exchange   Two blocks post rows in GMEM for each other, behind a
                  `ClusterBarrier`.
  multicast_load  One TMA load fills the same stage in two blocks; `full` is a
                  `Barrier`, `empty` a `ClusterBarrier`.
  cluster_ring    Two warpgroups a block, a ring of `num_stages` stages, one
                  multicast and one private operand.
"""

from __future__ import annotations

import importlib

_MODULES = ("peer_exchange", "multicast_load", "cluster_ring")

__all__ = list(_MODULES)


def __getattr__(name: str):
  # Lazy: a kernel module imports Pallas, its package must not.
  if name in _MODULES:
    return importlib.import_module(f"{__name__}.{name}")
  raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
  return sorted([*globals(), *_MODULES])
