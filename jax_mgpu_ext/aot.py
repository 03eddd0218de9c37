"""Compiles kernels to PTX and SASS for GPUs that are not there.

Needs the extra: `pip install 'jax-mgpu-ext[aot]'`.
"""

from jax_mgpu_ext._src.aot.assembly import assert_contains as assert_contains
from jax_mgpu_ext._src.aot.assembly import assert_lacks as assert_lacks
from jax_mgpu_ext._src.aot.assembly import assert_same_code as assert_same_code
from jax_mgpu_ext._src.aot.assembly import Assembly as Assembly
from jax_mgpu_ext._src.aot.assembly import AssemblyError as AssemblyError
from jax_mgpu_ext._src.aot.assembly import diff as diff
from jax_mgpu_ext._src.aot.assembly import parse_ptx as parse_ptx
from jax_mgpu_ext._src.aot.assembly import parse_sass as parse_sass
from jax_mgpu_ext._src.aot.cache import clear as clear_cache
from jax_mgpu_ext._src.aot.compiled import CompiledKernel as CompiledKernel
from jax_mgpu_ext._src.aot.compiled import KernelCode as KernelCode
from jax_mgpu_ext._src.aot.compilers import shut_down as shut_down
from jax_mgpu_ext._src.aot.compiling import compile_for as compile_for
from jax_mgpu_ext._src.aot.compiling import compile_kernel as compile_kernel
from jax_mgpu_ext._src.aot.sweep import sweep as sweep
from jax_mgpu_ext._src.aot.sweep import SweepRow as SweepRow
from jax_mgpu_ext._src.errors import AotUnavailableError as AotUnavailableError
from jax_mgpu_ext._src.errors import CompileError as CompileError
from jax_mgpu_ext._src.errors import CompileMemoryError as CompileMemoryError
from jax_mgpu_ext._src.errors import CompilerCrashError as CompilerCrashError
from jax_mgpu_ext._src.errors import CompileTimeoutError as CompileTimeoutError
from jax_mgpu_ext._src.errors import NoKernelError as NoKernelError
