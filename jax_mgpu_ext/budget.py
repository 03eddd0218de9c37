"""What specs, or a kernel, take of a GPU, item by item, and whether it fits."""

from jax_mgpu_ext._src.budget import Budget as Budget
from jax_mgpu_ext._src.budget import budget as budget
from jax_mgpu_ext._src.budget import fits as fits
from jax_mgpu_ext._src.budget_kernel import budget_kernel as budget_kernel
from jax_mgpu_ext._src.budget_rows import Row as Row
from jax_mgpu_ext._src.kernel_calls import find as kernel_calls
from jax_mgpu_ext._src.kernel_calls import KernelCall as KernelCall
from jax_mgpu_ext._src.refusals import refusals as refusals
