"""One answer for every spec: its ref aval, its array aval, or a `SpecError`."""

from jax_mgpu_ext._src.avals import array_aval as array_aval
from jax_mgpu_ext._src.avals import array_avals as array_avals
from jax_mgpu_ext._src.avals import is_array_spec as is_array_spec
from jax_mgpu_ext._src.avals import is_barrier as is_barrier
from jax_mgpu_ext._src.avals import is_cluster_barrier as is_cluster_barrier
from jax_mgpu_ext._src.avals import ref_aval as ref_aval
from jax_mgpu_ext._src.avals import ref_avals as ref_avals
from jax_mgpu_ext._src.avals import register_spec as register_spec
from jax_mgpu_ext._src.avals import unregister_spec as unregister_spec
from jax_mgpu_ext._src.partition import merge_specs as merge_specs
from jax_mgpu_ext._src.partition import partition_specs as partition_specs
