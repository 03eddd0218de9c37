"""Reference kernels: cluster kernels whose barrier protocols are explained.

One module a kernel, each with the same functions: `make_kernel` builds a
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

These write their barriers out; the others are made of composite specs
(`jax_mgpu_ext.specs`), and `by_hand` has a version of each that is not, with the
same machine code:

  local_ring        The plain ring, in one block: one or two consumers, filled by
                    TMA or by stores.
  hopper_gemm       Ring, wgmma, and multicast in clusters of two (h100).
  blackwell_gemm    Ring, tcgen05 and a ring of accumulators in TMEM (b200).
  split_k_gemm      The blocks of a cluster share K, and add up over SMEM (h100).
  cluster_softmax   The blocks of a cluster share rows, and exchange maxima and
                    sums over SMEM.
  cluster_rms_norm  The same with sums of squares, and a weight.
"""

from __future__ import annotations

import importlib

_MODULES = (
    "peer_exchange", "multicast_load", "cluster_ring", "local_ring",
    "hopper_gemm", "blackwell_gemm", "split_k_gemm", "cluster_softmax",
    "cluster_rms_norm",
)

__all__ = list(_MODULES)


def __getattr__(name: str):
  # Lazy: a kernel module imports Pallas, its package must not.
  if name in _MODULES:
    return importlib.import_module(f"{__name__}.{name}")
  raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
  return sorted([*globals(), *_MODULES])
