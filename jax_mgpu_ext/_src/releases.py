"""The supported JAX releases, and what we replace looks like in each.

`tools/fingerprints.py` writes the table; how to add a release is in
CONTRIBUTING.md.
"""

from __future__ import annotations

import re

SUPPORTED = ("0.10.2", "0.11.2", "0.12.0.1")
DEFAULT = "0.12.0.1"

# The Python that each release is tested with. JAX 0.10.2 is the last one for
# Python 3.11.
PYTHONS = {"0.10.2": "3.11", "0.11.2": "3.12", "0.12.0.1": "3.12"}

# Releases whose Pallas sources are those of a supported one.
_SAME_SOURCES = {"0.12.0": "0.12.0.1"}


def canonical(version: str) -> str:
  """Returns the supported release with the same Pallas sources, or `version`."""
  return _SAME_SOURCES.get(version, version)


def key(version: str) -> tuple[int, ...]:
  """Returns a version as numbers to compare; suffixes as `.dev1` do not count.

  >>> key("0.12.0.1") > key("0.12.0.dev20260101+abc")
  True
  """
  match = re.match(r"\d+(?:\.\d+)*", version)
  return tuple(map(int, match.group().split("."))) if match else ()


# Target -> fingerprint (see `hooks/guard.py`) -> releases that have it.
# BEGIN FINGERPRINTS
FINGERPRINTS: dict[str, dict[str, tuple[str, ...]]] = {
    "jax._src.pallas.core:_convert_out_shape_to_aval": {
        "5b805bf25428e832": ("0.10.2",),
        "d8a3e0b953070c45": ("0.11.2", "0.12.0.1"),
    },
    "jax._src.pallas.core:get_grid_mapping": {
        "6586ce479f75e09e": ("0.10.2",),
        "0cbb161de8648c10": ("0.11.2", "0.12.0.1"),
    },
    "jax._src.pallas.core:tracing_grid_env": {
        "7392b745ab27be8d": ("0.10.2", "0.11.2"),
        "2fc92f7a9c994c61": ("0.12.0.1",),
    },
    "jax._src.pallas.mosaic.interpret.thread_map:_thread_map_callback": {
        "absent": ("0.10.2",),
        "ab17d89d90750269": ("0.11.2", "0.12.0.1"),
    },
    "jax._src.pallas.mosaic_gpu.core:Barrier.__post_init__": {
        "fa1916b7c780241c": ("0.10.2", "0.11.2", "0.12.0.1"),
    },
    "jax._src.pallas.mosaic_gpu.core:Barrier.get_array_aval": {
        "82afad78e4af4e75": ("0.10.2", "0.11.2", "0.12.0.1"),
    },
    "jax._src.pallas.mosaic_gpu.core:Barrier.get_ref_aval": {
        "7bf93e4ccb5b8168": ("0.10.2", "0.11.2", "0.12.0.1"),
    },
    "jax._src.pallas.mosaic_gpu.core:ClusterBarrier.__post_init__": {
        "fa1916b7c780241c": ("0.10.2", "0.11.2", "0.12.0.1"),
    },
    "jax._src.pallas.mosaic_gpu.core:ClusterBarrier.get_array_aval": {
        "99f3603c5dd6be23": ("0.10.2", "0.11.2", "0.12.0.1"),
    },
    "jax._src.pallas.mosaic_gpu.core:GPUMemoryRef.__post_init__": {
        "1dc520de4ddc993b": ("0.10.2", "0.11.2", "0.12.0.1"),
    },
    "jax._src.pallas.mosaic_gpu.core:MemorySpace.__call__": {
        "eb6c9fb93f519915": ("0.10.2", "0.11.2", "0.12.0.1"),
    },
    "jax._src.pallas.mosaic_gpu.core:Mesh.__post_init__": {
        "0195c61ed77a6158": ("0.10.2", "0.11.2", "0.12.0.1"),
    },
    "jax._src.pallas.mosaic_gpu.core:RefUnion.__init__": {
        "1edd86cdc25977cc": ("0.10.2", "0.11.2", "0.12.0.1"),
    },
    "jax._src.pallas.mosaic_gpu.core:SwizzleTransform.transform_type": {
        "961fa52a623f8d95": ("0.10.2", "0.11.2", "0.12.0.1"),
    },
    "jax._src.pallas.mosaic_gpu.core:TilingTransform.transform_type": {
        "7902350e801f479f": ("0.10.2", "0.11.2", "0.12.0.1"),
    },
    "jax._src.pallas.mosaic_gpu.core:WGMMAAccumulatorRef.get_array_aval": {
        "absent": ("0.10.2", "0.11.2", "0.12.0.1"),
    },
    "jax._src.pallas.mosaic_gpu.core:array_aval_of": {
        "absent": ("0.10.2", "0.11.2", "0.12.0.1"),
    },
    "jax._src.pallas.mosaic_gpu.core:kernel": {
        "cd7167e3653aa697": ("0.10.2",),
        "493caf96eb535338": ("0.11.2",),
        "9daa3ccbed94036c": ("0.12.0.1",),
    },
    "jax._src.pallas.mosaic_gpu.core:ref_aval_of": {
        "absent": ("0.10.2", "0.11.2", "0.12.0.1"),
    },
    "jax._src.pallas.mosaic_gpu.core:register_spec": {
        "absent": ("0.10.2", "0.11.2", "0.12.0.1"),
    },
    "jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks:_clear_shared_memory": {
        "6c7fbd7fb9bf6649": ("0.10.2", "0.11.2", "0.12.0.1"),
    },
    "jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks:_initialize_shared_memory": {
        "3485b40947b1fde6": ("0.10.2",),
        "84df0b0fd92b3edf": ("0.11.2",),
        "4821b274e21f69e7": ("0.12.0.1",),
    },
    "jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks:reset_gpu_interpret_mode_state": {
        "154468d2b1ce732c": ("0.10.2", "0.11.2", "0.12.0.1"),
    },
    "jax._src.pallas.mosaic_gpu.interpret.jaxpr_interpret:JaxprInterpreter._interpret_run_scoped_p": {
        "f57f9dff3d2949e4": ("0.10.2",),
        "edf55953a5c009f8": ("0.11.2", "0.12.0.1"),
    },
    "jax._src.pallas.mosaic_gpu.interpret.jaxpr_interpret:_get_barrier_allocation_key_from_inval": {
        "8627ecbdd85fec37": ("0.10.2",),
        "a0e800a9cce79f73": ("0.11.2", "0.12.0.1"),
    },
    "jax._src.pallas.mosaic_gpu.interpret.shared_memory:Barrier.__init__": {
        "41bbc8d6d3edc248": ("0.10.2",),
        "f52745e27b009856": ("0.11.2", "0.12.0.1"),
    },
    "jax._src.pallas.mosaic_gpu.interpret.shared_memory:Barrier._wait": {
        "absent": ("0.10.2",),
        "0ab49733ffc811ef": ("0.11.2", "0.12.0.1"),
    },
    "jax._src.pallas.mosaic_gpu.interpret.shared_memory:Barrier.arrivals_count": {
        "absent": ("0.10.2", "0.11.2", "0.12.0.1"),
    },
    "jax._src.pallas.mosaic_gpu.interpret.shared_memory:Barrier.arrive": {
        "64dacb8771ad7bbb": ("0.10.2",),
        "3eb2e37a2ab18101": ("0.11.2", "0.12.0.1"),
    },
    "jax._src.pallas.mosaic_gpu.interpret.shared_memory:GPUSharedMemory.allocate_barrier": {
        "4d451e7ff7edd79e": ("0.10.2",),
        "3b27513632067957": ("0.11.2",),
        "b0abbf16ab2b6343": ("0.12.0.1",),
    },
    "jax._src.pallas.mosaic_gpu.interpret.shared_memory:GPUSharedMemory.allocate_cluster_barrier": {
        "absent": ("0.10.2",),
        "9e3a9ba12e8519df": ("0.11.2",),
        "c957d302376cab26": ("0.12.0.1",),
    },
    "jax._src.pallas.mosaic_gpu.interpret.shared_memory:GPUSharedMemory.assert_no_barriers_allocated": {
        "488157dfb39fd404": ("0.10.2",),
        "6aa3974d36a8db5d": ("0.11.2", "0.12.0.1"),
    },
    "jax._src.pallas.mosaic_gpu.interpret.shared_memory:GPUSharedMemory.check_failed": {
        "absent": ("0.10.2", "0.11.2", "0.12.0.1"),
    },
    "jax._src.pallas.mosaic_gpu.interpret.shared_memory:GPUSharedMemory.deallocate_barrier": {
        "12d7c5b95d6515ea": ("0.10.2",),
        "3a72c5b2501fdd6c": ("0.11.2",),
        "5cb8a9d6cb73e8a0": ("0.12.0.1",),
    },
    "jax._src.pallas.mosaic_gpu.interpret.shared_memory:GPUSharedMemory.deallocate_cluster_barrier": {
        "absent": ("0.10.2",),
        "ede5dd5d5fd316fb": ("0.11.2",),
        "21bc37f352fe0932": ("0.12.0.1",),
    },
    "jax._src.pallas.mosaic_gpu.interpret.shared_memory:GPUSharedMemory.execute_async_task": {
        "absent": ("0.10.2",),
        "9919324e33ac043d": ("0.11.2", "0.12.0.1"),
    },
    "jax._src.pallas.mosaic_gpu.interpret.shared_memory:GPUSharedMemory.get_barrier": {
        "absent": ("0.10.2",),
        "3b823c3c9ce0f2b0": ("0.11.2", "0.12.0.1"),
    },
    "jax._src.pallas.mosaic_gpu.interpret.shared_memory:GPUSharedMemory.get_barrier_and_increment_clock": {
        "7f7929b557e9aee2": ("0.10.2",),
        "88b8b9a075bad35d": ("0.11.2", "0.12.0.1"),
    },
    "jax._src.pallas.mosaic_gpu.interpret.shared_memory:GPUSharedMemory.kernel_thread_finished": {
        "absent": ("0.10.2",),
        "ec819aa47341363f": ("0.11.2", "0.12.0.1"),
    },
    "jax._src.pallas.mosaic_gpu.interpret.shared_memory:GPUSharedMemory.named_barrier": {
        "absent": ("0.10.2",),
        "5491d5150b8054fc": ("0.11.2", "0.12.0.1"),
    },
    "jax._src.pallas.mosaic_gpu.interpret.shared_memory:GPUSharedMemory.reset_per_cluster_state": {
        "absent": ("0.10.2",),
        "5586f8e465c6c1f6": ("0.11.2",),
        "4d48eac394cc15fc": ("0.12.0.1",),
    },
    "jax._src.pallas.mosaic_gpu.interpret.shared_memory:GPUSharedMemory.set_failed": {
        "absent": ("0.10.2", "0.11.2", "0.12.0.1"),
    },
    "jax._src.pallas.mosaic_gpu.lowering:_resolve_cluster_axis": {
        "15afe684eed3bdaf": ("0.10.2", "0.11.2", "0.12.0.1"),
    },
    "jax._src.pallas.mpmd:_aval_to_ref_aval": {
        "53ceffc4dff66ee7": ("0.10.2",),
        "9017e2ef9499e5fc": ("0.11.2", "0.12.0.1"),
    },
    "jax._src.pallas.mpmd:_mpmd_map": {
        "b1736f5613c143ef": ("0.10.2",),
        "3638864f53d7b1e1": ("0.11.2", "0.12.0.1"),
    },
    "jax._src.pallas.pallas_call:pallas_call": {
        "444c9ac032ebe489": ("0.10.2", "0.11.2", "0.12.0.1"),
    },
    "jax._src.pallas.primitives:run_scoped": {
        "81e363446f4b8ca7": ("0.10.2",),
        "f436057daeb5d805": ("0.11.2", "0.12.0.1"),
    },
    "jax._src.state.types:RefIndexer.__getitem__": {
        "786773ae925059e0": ("0.10.2", "0.11.2", "0.12.0.1"),
    },
}
# END FINGERPRINTS
