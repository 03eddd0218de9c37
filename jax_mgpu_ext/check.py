"""Kernel cases, and the stages that check them without a GPU.

A case is declared where its kernel is, or anywhere else:

  @kernel_case(
      inputs=lambda rng: [rng.random((64, 64), np.float32)],
      reference=lambda x: 2 * x,
      params={"2_stages": dict(num_stages=2), "4_stages": dict(num_stages=4)},
  )
  def double(*, num_stages, interpret=None):
    return plgpu.kernel(..., interpret=interpret)

`mgpu-ext check FILE.py`, or `run(["FILE.py"])`, then checks it.
"""

from jax_mgpu_ext._src.check import CaseResult as CaseResult
from jax_mgpu_ext._src.check import kernel_case as kernel_case
from jax_mgpu_ext._src.check import KernelCase as KernelCase
from jax_mgpu_ext._src.check import run as run
from jax_mgpu_ext._src.check import STAGES as STAGES
from jax_mgpu_ext._src.check import StageResult as StageResult
from jax_mgpu_ext._src.check import TARGETS as TARGETS
from jax_mgpu_ext._src.check import UsageError as UsageError
