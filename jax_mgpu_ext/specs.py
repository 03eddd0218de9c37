"""Composite specs: rings, barrier pairs, tiled SMEM, and bundles of them.

They go into `plgpu.kernel(scratch_types=...)` and `pl.run_scoped` as JAX's own
specs do; the body gets objects of the same classes, which hold refs.
"""

from jax_mgpu_ext._src.specs.accumulator_ring import AccumulatorRing as AccumulatorRing
from jax_mgpu_ext._src.specs.barriers import BarrierPair as BarrierPair
from jax_mgpu_ext._src.specs.barriers import MaybeClusterBarrier as MaybeClusterBarrier
from jax_mgpu_ext._src.specs.ring_buffer import RingBuffer as RingBuffer
from jax_mgpu_ext._src.specs.scratch_struct import scratch_struct as scratch_struct
from jax_mgpu_ext._src.specs.tiled_smem import TiledSMEM as TiledSMEM
