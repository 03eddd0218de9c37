"""The GPUs that a kernel can be budgeted and compiled for, as data."""

from jax_mgpu_ext._src.errors import TargetError as TargetError
from jax_mgpu_ext._src.targets import get as get
from jax_mgpu_ext._src.targets import load as load
from jax_mgpu_ext._src.targets import names as names
from jax_mgpu_ext._src.targets import Target as Target
