"""Activates and inspects the hooks into JAX."""

from jax_mgpu_ext._src.hooks import activate as activate
from jax_mgpu_ext._src.hooks import activated as activated
from jax_mgpu_ext._src.hooks import deactivate as deactivate
from jax_mgpu_ext._src.hooks import get_original as get_original
from jax_mgpu_ext._src.hooks import HookStatus as HookStatus
from jax_mgpu_ext._src.hooks import is_active as is_active
from jax_mgpu_ext._src.hooks import SLUGS as SLUGS
from jax_mgpu_ext._src.hooks import status as status
