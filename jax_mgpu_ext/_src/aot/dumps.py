"""Reads what Mosaic writes about the kernels that it compiles.

With `MOSAIC_GPU_DUMP_TO=folder` every kernel leaves, among others,

  NAME_N.ptx                the PTX
  NAME_N.ptxas              what the assembler says of registers, spills, warnings
  NAME_N.mlir-passes.log    the module before each pass of the compiler

where N counts the kernels of the process.
"""

from __future__ import annotations

from collections.abc import Sequence
import pathlib
import re
from typing import Any

_DUMP = re.compile(r"(?P<name>.*)_(?P<number>\d+)\.ptx")
_ENTRY = re.compile(r"Compiling entry function '([^']*)'")
_REGISTERS = re.compile(r"\bUsed (\d+) registers")
_STATIC_SMEM = re.compile(r"\b(\d+) bytes smem")
_STACK = re.compile(
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
)
# Worth a warning, though the assembler calls it information: its code, as
# C7510, comes first.
_REMARK = re.compile(r"^ptxas (?:warning|error|info)\s*:\s*\(?(?P<text>.*)$")
_PASS = "// -----// IR Dump Before "
_LAUNCH = re.compile(
    r"gpu\.launch_func\b.*?(?:clusters in \((?P<cluster>[^)]*)\)\s*)?"
    r"blocks in \((?P<grid>[^)]*)\)\s*threads in \((?P<block>[^)]*)\)\s*"
    r"(?:dynamic_shared_memory_size (?P<smem>%\S+))?"
)
_CONSTANT = re.compile(
    r"^\s*(%\S+) = (?:arith|llvm\.mlir)\.constant[ (]([-\d]+)", re.MULTILINE
)
# Text of the SASS that names the function.
_FUNCTION = re.compile(r"^\s*\.global\s+(\S+)", re.MULTILINE)


class DumpError(ValueError):
  """A dump that does not look like one of Mosaic's."""


def read(folder: pathlib.Path) -> list[dict[str, Any]]:
  """Returns what was dumped about each kernel, in the order of compilation.

  Raises:
    DumpError: Something is missing or cannot be understood.
  """
  found = []
  for path in folder.glob("*.ptx"):
    match = _DUMP.fullmatch(path.name)
    if match is None:
      raise DumpError(f"expected NAME_N.ptx, got {path.name!r}")
    # The numbers are of when a kernel was lowered, in some releases.
    found.append((path.stat().st_mtime_ns, int(match["number"]), match["name"], path))
  kernels = []
  for _, _, name, path in sorted(found):
    log = _text(path.with_suffix(".ptxas"))
    passes = _text(path.with_suffix(".mlir-passes.log"))
    kernels.append({
        "name": name,
        "ptx": path.read_text(encoding="utf-8", errors="replace"),
        "sass": "",
        "mlir": _first_module(passes),
        "ptxas": log,
        **read_log(log),
        **read_launch(passes),
    })
  return kernels


def _text(path: pathlib.Path) -> str:
  try:
    return path.read_text(encoding="utf-8", errors="replace")
  except OSError as e:
    raise DumpError(f"expected a file {path.name}: {e.strerror}") from e


def read_log(log: str) -> dict[str, Any]:
  """Reads what the assembler said about one kernel.

  Args:
    log: The text of a `.ptxas` file.

  Raises:
    DumpError: It does not say what it should.
  """
  registers, stack = _REGISTERS.search(log), _STACK.search(log)
  if registers is None or stack is None:
    raise DumpError(
        "expected the assembler to tell registers and spills, got"
        f" {log[:200]!r}"
    )
  smem = _STATIC_SMEM.search(log)
  warnings = []
  for line in log.splitlines():
    match = _REMARK.match(line.strip())
    if match and (
        line.lstrip().startswith(("ptxas warning", "ptxas error"))
        or re.match(r"C\d+\)", match["text"])
    ):
      warnings.append(line.strip())
  return {
      "registers": int(registers[1]),
      "stack_bytes": int(stack[1]),
      "spill_store_bytes": int(stack[2]),
      "spill_load_bytes": int(stack[3]),
      "static_smem_bytes": int(smem[1]) if smem else 0,
      "warnings": list(dict.fromkeys(warnings)),
  }


def read_launch(passes: str) -> dict[str, Any]:
  """Reads how a kernel is launched out of the log of the passes.

  Args:
    passes: The text of a `.mlir-passes.log` file.

  Raises:
    DumpError: No launch is found.
  """
  for section in passes.split(_PASS)[1:]:
    launch = _LAUNCH.search(section)
    if launch is None:
      continue
    constants = dict(_CONSTANT.findall(section))
    try:
      return {
          key: tuple(int(constants[v.strip()]) for v in launch[key].split(","))
          if launch[key]
          else (1, 1, 1)
          for key in ("grid", "cluster", "block")
      } | {
          "dynamic_smem_bytes": int(constants[launch["smem"]])
          if launch["smem"]
          else 0
      }
    except KeyError as e:
      raise DumpError(f"expected a constant {e} before the launch") from e
  raise DumpError("expected a gpu.launch_func in the log of the passes")


def _first_module(passes: str) -> str:
  """Returns the module as it was handed to the compiler."""
  _, _, rest = passes.partition(_PASS)
  first, _, _ = rest.partition(_PASS)
  return first.partition("\n")[2].strip() + "\n"


def with_sass(
    kernels: Sequence[dict[str, Any]], texts: Sequence[str]
) -> list[dict[str, Any]]:
  """Returns kernels with their disassembly.

  Args:
    kernels: What `read` returned.
    texts: The disassembly of each binary, in the order of compilation; kernels
      of one name are told apart by that order.

  Raises:
    DumpError: A kernel has no binary.
  """
  by_name: dict[str, list[str]] = {}
  for text in texts:
    match = _FUNCTION.search(text)
    by_name.setdefault(match[1] if match else "", []).append(text)
  result = []
  for kernel in kernels:
    entry = _ENTRY.search(kernel["ptxas"])
    waiting = by_name.get(entry[1] if entry else "")
    if not waiting:
      raise DumpError(f"no binary of kernel {kernel['name']!r} was kept")
    result.append({**kernel, "sass": waiting.pop(0)})
  return result
