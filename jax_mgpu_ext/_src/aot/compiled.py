"""What came out of the compiler, as data."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import math
from typing import Any

from jax_mgpu_ext._src import budget
from jax_mgpu_ext._src import budget_limits
from jax_mgpu_ext._src.aot import assembly
from jax_mgpu_ext._src.targets import Target


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelCode:
  """The code of one Mosaic GPU kernel.

  Attributes:
    name: The kernel's name.
    ptx: Its PTX.
    sass: Its disassembly, empty if none was wanted.
    mlir: The module that Mosaic was handed, as text.
    ptxas: What the assembler said.
    registers: Registers of a thread.
    stack_bytes: Stack of a thread, in bytes.
    spill_store_bytes: What a thread stores because registers ran out, in bytes.
    spill_load_bytes: What it loads back.
    static_smem_bytes: Shared memory of a block that the code itself declares.
    dynamic_smem_bytes: Shared memory of a block that the launch asks for.
    grid: Blocks of the launch, x first.
    cluster: Blocks of a cluster, x first.
    block: Threads of a block, x first.
    warnings: What the assembler warns of, one line each.
  """

  name: str
  ptx: str
  sass: str
  mlir: str
  ptxas: str
  registers: int
  stack_bytes: int
  spill_store_bytes: int
  spill_load_bytes: int
  static_smem_bytes: int
  dynamic_smem_bytes: int
  grid: tuple[int, ...]
  cluster: tuple[int, ...]
  block: tuple[int, ...]
  warnings: tuple[str, ...]

  def __post_init__(self):
    for name in ("grid", "cluster", "block", "warnings"):
      object.__setattr__(self, name, tuple(getattr(self, name)))

  @property
  def spill_bytes(self) -> int:
    """What a thread stores and loads because registers ran out, in bytes."""
    return self.spill_store_bytes + self.spill_load_bytes

  @property
  def smem_bytes(self) -> int:
    """Dynamic shared memory of a block, in bytes: what the launch asks for."""
    return self.dynamic_smem_bytes

  @property
  def mbarriers(self) -> int:
    """How many mbarriers are initialised in the code."""
    return self.assembly().class_counts().get("mbarrier_init", 0)

  @property
  def tmem_columns(self) -> int:
    """Columns of tensor memory that a block allocates."""
    constants: dict[str, int] = {}
    columns = 0
    for instruction in self.assembly().instructions():
      last = instruction.operands.rpartition(",")[2].strip()
      if instruction.full_opcode == "mov.b32" and last.isdecimal():
        constants[instruction.operands.partition(",")[0].strip()] = int(last)
      elif instruction.full_opcode.startswith("tcgen05.alloc."):
        columns += int(last) if last.isdecimal() else constants.get(last, 0)
    return columns

  def assembly(self) -> assembly.Assembly:
    """Returns the PTX, parsed."""
    return assembly.parse_ptx(self.ptx)

  def sass_assembly(self) -> assembly.Assembly:
    """Returns the SASS, parsed.

    Raises:
      ValueError: There is none.
    """
    if not self.sass:
      raise ValueError("there is no SASS: compile with sass=True")
    return assembly.parse_sass(self.sass)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledKernel:
  """A function that was compiled for a target, with its kernels.

  The numbers are those of the kernel that needs most, where there are several.

  Attributes:
    target: What it was compiled for.
    kernels: The code of each different Mosaic GPU kernel that it calls.
    resources: The budget of each call of `plgpu.kernel`, in program order.
    xla: XLA's text of the whole executable.
    compile_s: How long compiling took, in seconds, when it was done.
    cached: Whether it came from the cache on disk.
  """

  target: Target
  kernels: tuple[KernelCode, ...]
  resources: tuple[budget.Budget, ...]
  xla: str
  compile_s: float
  cached: bool

  @property
  def ptx(self) -> str:
    """The PTX of all kernels."""
    return "\n".join(kernel.ptx for kernel in self.kernels)

  @property
  def sass(self) -> str:
    """The disassembly of all kernels, empty if none was wanted."""
    return "\n".join(kernel.sass for kernel in self.kernels if kernel.sass)

  @property
  def mlir(self) -> str:
    """The Mosaic modules of all kernels."""
    return "\n".join(kernel.mlir for kernel in self.kernels)

  @property
  def registers(self) -> int:
    """Registers of a thread."""
    return max(kernel.registers for kernel in self.kernels)

  @property
  def spill_bytes(self) -> int:
    """What a thread stores and loads because registers ran out, in bytes."""
    return max(kernel.spill_bytes for kernel in self.kernels)

  @property
  def stack_bytes(self) -> int:
    """Stack of a thread, in bytes."""
    return max(kernel.stack_bytes for kernel in self.kernels)

  @property
  def smem_bytes(self) -> int:
    """Dynamic shared memory of a block, in bytes."""
    return max(kernel.smem_bytes for kernel in self.kernels)

  @property
  def tmem_columns(self) -> int:
    """Columns of tensor memory that a block allocates."""
    return max(kernel.tmem_columns for kernel in self.kernels)

  @property
  def mbarriers(self) -> int:
    """How many mbarriers a kernel initialises."""
    return max(kernel.mbarriers for kernel in self.kernels)

  @property
  def cluster(self) -> tuple[int, ...]:
    """Blocks of a cluster, x first."""
    return max(self.kernels, key=lambda k: math.prod(k.cluster)).cluster

  @property
  def cluster_size(self) -> int:
    """Blocks of a cluster, in all."""
    return math.prod(self.cluster)

  @property
  def blocks_per_sm(self) -> int:
    """How many blocks a multiprocessor can hold, by all that limits it."""
    return min(
        budget_limits.blocks_per_sm(
            self.target,
            smem_bytes=kernel.dynamic_smem_bytes,
            threads=math.prod(kernel.block),
            tmem_columns=kernel.tmem_columns,
            registers_per_thread=kernel.registers,
        )[0]
        for kernel in self.kernels
    )

  @property
  def warnings(self) -> tuple[str, ...]:
    """What the assembler warns of, one line each."""
    return tuple(
        dict.fromkeys(line for k in self.kernels for line in k.warnings)
    )

  def class_counts(self) -> dict[str, int]:
    """Returns how many instructions of each class the kernels have.

    In the SASS, if there is some, else in the PTX; see `assembly`.
    """
    counts: dict[str, int] = {}
    for kernel in self.kernels:
      parsed = kernel.sass_assembly() if kernel.sass else kernel.assembly()
      for name, count in parsed.class_counts().items():
        counts[name] = counts.get(name, 0) + count
    return counts

  def to_json(self, *, texts: bool = False) -> dict[str, Any]:
    """Returns the numbers as plain data.

    Args:
      texts: Whether PTX, SASS and MLIR are to be in it.
    """
    long = ("ptx", "sass", "mlir", "ptxas")
    kernels = []
    for kernel in self.kernels:
      document = dataclasses.asdict(kernel)
      if not texts:
        document = {k: v for k, v in document.items() if k not in long}
      kernels.append(document)
    return {
        "target": self.target.name,
        "registers": self.registers,
        "spill_bytes": self.spill_bytes,
        "stack_bytes": self.stack_bytes,
        "smem_bytes": self.smem_bytes,
        "tmem_columns": self.tmem_columns,
        "cluster_size": self.cluster_size,
        "blocks_per_sm": self.blocks_per_sm,
        "mbarriers": self.mbarriers,
        "opcode_classes": self.class_counts(),
        "warnings": list(self.warnings),
        "compile_s": self.compile_s,
        "cached": self.cached,
        "budgets": [resource.to_json() for resource in self.resources],
        "kernels": kernels,
        **({"xla": self.xla} if texts else {}),
    }


def from_worker(
    event: Mapping[str, Any],
    target: Target,
    resources: tuple[budget.Budget, ...],
    *,
    cached: bool,
) -> CompiledKernel:
  """Returns what a worker, or the cache, has sent."""
  kernels = tuple(KernelCode(**kernel) for kernel in event["kernels"])
  if len(kernels) == len(resources) == 1:
    # Now that the registers are known.
    blocks, limited_by = budget_limits.blocks_per_sm(
        target,
        smem_bytes=resources[0].smem_bytes,
        threads=resources[0].threads,
        tmem_columns=resources[0].tmem_columns_requested,
        registers_per_thread=kernels[0].registers,
    )
    resources = (
        dataclasses.replace(
            resources[0], blocks_per_sm=blocks, limited_by=limited_by
        ),
    )
  return CompiledKernel(
      target=target,
      kernels=kernels,
      resources=resources,
      xla=event["xla"],
      compile_s=event["compile_s"],
      cached=cached,
  )
