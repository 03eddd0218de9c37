"""The GPUs that a kernel can be budgeted and compiled for, as data.

The numbers are in `targets.toml`, each with its source. Further targets come from
files of the same form: `get("my_gpus.toml::h20")`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
import dataclasses
import difflib
import functools
import math
import os
import pathlib
import tomllib
from typing import Any

from jax_mgpu_ext._src import errors

_SHIPPED = pathlib.Path(__file__).with_suffix(".toml")
_SEPARATOR = "::"
# More than any of them; one that is larger is a slip of the pen.
_MAX_NUMBER = 2**50
# No file of targets is larger; what is, was given by mistake.
_MAX_FILE_BYTES = 1 << 16
# What Mosaic GPU compiles for; LLVM ends the process for others.
_CAPABILITIES = range(9, 13)
# Of numbers that XLA keeps in 32 bits.
_MAX_COUNT = 2**31 - 1
_LARGE = ("memory_bytes", "memory_bytes_per_s")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
  """A GPU: its limits, and what XLA wants to know of it.

  Attributes:
    name: What it is called here, as `h100`.
    description: What the driver calls it.
    compute_capability: Major and minor number.
    sm_count: Streaming multiprocessors.
    smem_bytes_per_block: The most dynamic shared memory that a thread block may
      opt in to, in bytes.
    smem_bytes_per_sm: Shared memory of a multiprocessor, in bytes.
    smem_bytes_reserved_per_block: What the system takes of it for each block.
    registers_per_sm: 32-bit registers of a multiprocessor.
    registers_per_block: The most that a block may have.
    registers_per_thread: The most that a thread may have.
    threads_per_sm: Resident threads of a multiprocessor.
    threads_per_block: The most threads of a block.
    blocks_per_sm: Resident blocks of a multiprocessor.
    tmem_columns: Columns of tensor memory that a block may allocate; 0: it has
      none.
    cluster_size_portable: Blocks of a cluster that every GPU accepts.
    cluster_size_max: The most blocks of a cluster, with the non-portable
      attribute, which Mosaic sets.
    l2_bytes: Size of the level-2 cache.
    memory_bytes: Size of the device memory.
    memory_bytes_per_s: Its bandwidth, in bytes per second.
    clock_ghz: The highest clock, in GHz.
  """

  name: str
  description: str
  compute_capability: tuple[int, int]
  sm_count: int
  smem_bytes_per_block: int
  smem_bytes_per_sm: int
  smem_bytes_reserved_per_block: int
  registers_per_sm: int
  registers_per_block: int
  registers_per_thread: int
  threads_per_sm: int
  threads_per_block: int
  blocks_per_sm: int
  tmem_columns: int
  cluster_size_portable: int
  cluster_size_max: int
  l2_bytes: int
  memory_bytes: int
  memory_bytes_per_s: int
  clock_ghz: float

  def __post_init__(self):
    for field in dataclasses.fields(self):
      object.__setattr__(
          self, field.name, _canonical(field, getattr(self, field.name))
      )
    if self.cluster_size_max < self.cluster_size_portable:
      raise _bad_value(
          "cluster_size_max", self.cluster_size_max,
          f"at least cluster_size_portable, {self.cluster_size_portable}",
      )

  @property
  def arch(self) -> str:
    """The architecture with its own instructions, as `sm_90a`."""
    return "sm_{}{}a".format(*self.compute_capability)

  @property
  def has_wgmma(self) -> bool:
    """Whether it has `wgmma`, which only compute capability 9.0 has."""
    return self.compute_capability[0] == 9

  @property
  def has_tcgen05(self) -> bool:
    """Whether it has `tcgen05` and with it tensor memory."""
    return self.tmem_columns > 0

  def xla_target_config(self) -> str:
    """Returns XLA's description of the GPU (`GpuTargetConfigProto`, as text)."""
    major, minor = self.compute_capability
    return f"""
gpu_device_info {{
  threads_per_block_limit: {self.threads_per_block}
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {self.smem_bytes_per_block}
  shared_memory_per_core: {self.smem_bytes_per_sm}
  threads_per_core_limit: {self.threads_per_sm}
  core_count: {self.sm_count}
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {self.memory_bytes_per_s}
  l2_cache_size: {self.l2_bytes}
  clock_rate_ghz: {self.clock_ghz}
  device_memory_size: {self.memory_bytes}
  cuda_compute_capability {{
    major: {major}
    minor: {minor}
    feature_extension: ACCELERATED_FEATURES
  }}
  registers_per_core_limit: {self.registers_per_sm}
  registers_per_block_limit: {self.registers_per_block}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: {_quoted(self.description)}
"""

  def to_json(self) -> dict[str, Any]:
    """Returns the fields as plain numbers, strings and lists."""
    document = dataclasses.asdict(self)
    document["compute_capability"] = list(self.compute_capability)
    return document


def from_json(document: Mapping[str, Any]) -> Target:
  """Returns the target that `Target.to_json` has described."""
  return Target(**document)


def names() -> tuple[str, ...]:
  """Returns the names of the shipped targets."""
  return tuple(_shipped())


def get(target: str | Target) -> Target:
  """Returns a target.

  Args:
    target: The name of a shipped one, `file.toml::name`, `file.toml` if there
      is only one in it, or a target, which is returned as it is.

  Raises:
    TargetError: There is no such target, or its file cannot be used.
  """
  if isinstance(target, Target):
    return target
  if not isinstance(target, str):
    raise errors.TargetError(
        f"expected the name of a target, got {type(target).__name__}:"
        f" {errors.one_line(repr(target), 80)}"
    )
  shipped = _shipped()
  if target in shipped:
    return shipped[target]
  path, separator, name = target.rpartition(_SEPARATOR)
  if not separator:
    if not target.endswith(".toml"):
      likely = difflib.get_close_matches(target.lower(), shipped, n=1)
      raise errors.TargetError(
          f"unknown target {errors.one_line(target, 80)!r}, expected one of"
          f" {', '.join(shipped)}, or file.toml::name for one of your own"
          + (f"; did you mean {likely[0]}?" if likely else "")
      )
    path = target
  found = load(path)
  if not separator and len(found) == 1:
    return next(iter(found.values()))
  if name not in found:
    raise errors.TargetError(
        f"expected one of the targets {', '.join(found)} of {path!r}: write"
        f" {path}::{next(iter(found))}"
        + (f", got {errors.one_line(name, 80)!r}" if separator else "")
    )
  return found[name]


def distinct(targets: Iterable[str | Target]) -> dict[str, Target]:
  """Returns targets by their names.

  Raises:
    TargetError: One is not known, or two different ones have one name.
  """
  found: dict[str, Target] = {}
  for target in targets:
    one = get(target)
    if found.setdefault(one.name, one) != one:
      raise errors.TargetError(
          f"two different targets are called {one.name!r}: give one another name"
      )
  return found


@functools.cache
def _shipped() -> dict[str, Target]:
  return load(_SHIPPED)


def load(path: str | os.PathLike[str]) -> dict[str, Target]:
  """Reads targets from a TOML file.

  Each is a table `[targets.NAME]` with the attributes of `Target`, or with
  `based_on` and those that differ.

  Args:
    path: The file.

  Returns:
    Name -> target, in their order.

  Raises:
    TargetError: The file cannot be read, or something in it is not legal; says
      what and where.
  """
  shown = errors.one_line(os.fspath(path), 200)
  try:
    with open(path, "rb") as file:
      data = file.read(_MAX_FILE_BYTES + 1)
    if len(data) > _MAX_FILE_BYTES:
      raise ValueError("it is larger than 64 KiB")
    document = tomllib.loads(data.decode())
  except (OSError, ValueError, RecursionError) as e:
    reason = e.strerror if isinstance(e, OSError) else str(e)
    raise errors.TargetError(
        f"cannot read targets from {shown!r}: {errors.one_line(str(reason), 200)}"
    ) from e
  tables = document.get("targets")
  if (
      not isinstance(tables, dict)
      or not tables
      or not all(isinstance(table, dict) for table in tables.values())
  ):
    raise errors.TargetError(
        f"expected tables [targets.NAME] in {shown!r}, got"
        f" {', '.join(document) or 'none'}"
    )
  if extra := [key for key in document if key != "targets"]:
    raise errors.TargetError(
        f"expected only tables [targets.NAME] in {shown!r}, got"
        f" {errors.one_line(', '.join(extra), 80)}"
    )
  bases = {} if path == _SHIPPED else dict(_shipped())
  found: dict[str, Target] = {}
  for name, table in tables.items():
    try:
      found[name] = _make(name, table, {**bases, **found})
    except errors.TargetError as e:
      raise errors.TargetError(
          f"target {errors.one_line(name, 80)!r} in {shown!r}: {e.problem}"
      ) from e
  return found


def _make(
    name: str, table: dict[str, Any], bases: Mapping[str, Target]
) -> Target:
  """Returns a target from its table."""
  if name.strip() != name or not name.isprintable() or _SEPARATOR in name:
    raise errors.TargetError("expected a printable name without '::'")
  values = dict(table)
  values.pop("name", None)
  base = values.pop("based_on", None)
  if base is not None:
    if not isinstance(base, str) or base not in bases:
      raise errors.TargetError(
          "expected based_on to name a target that stands before it or is"
          f" shipped ({', '.join(bases)}), got"
          f" {errors.one_line(repr(base), 80)}"
      )
    values = {**bases[base].to_json(), **values}
  values["name"] = name
  known = [field.name for field in dataclasses.fields(Target)]
  if unknown := [key for key in values if key not in known]:
    raise errors.TargetError(
        f"unknown key {unknown[0]!r}, expected some of {', '.join(known[1:])}"
    )
  if missing := [key for key in known if key not in values]:
    raise errors.TargetError(
        f"{', '.join(missing)} missing: write them, or based_on = \"h100\""
    )
  return Target(**values)


def _canonical(field: dataclasses.Field[Any], value: Any) -> Any:
  """Returns the value of a field as it is kept.

  Raises:
    TargetError: It is not legal.
  """
  if field.type == "str":
    if not isinstance(value, str) or not value or not value.isprintable():
      raise _bad_value(field.name, value, "a printable text")
    return value
  if field.name == "compute_capability":
    if (
        not isinstance(value, (tuple, list))
        or len(value) != 2
        or not all(type(number) is int and 0 <= number < 100 for number in value)
    ):
      raise _bad_value(field.name, value, "two numbers, as [9, 0]")
    if value[0] not in _CAPABILITIES:
      raise _bad_value(
          field.name, value,
          f"[{_CAPABILITIES[0]}, 0] to [{_CAPABILITIES[-1]}, ...], for which"
          " Mosaic GPU compiles",
      )
    return tuple(value)
  kinds = (int, float) if field.type == "float" else (int,)
  least = 0 if field.name in ("tmem_columns", "smem_bytes_reserved_per_block") else 1
  if (
      isinstance(value, bool)
      or not isinstance(value, kinds)
      # First: an int may be too large to be asked whether it is finite.
      or value > (_MAX_NUMBER if field.name in _LARGE else _MAX_COUNT)
      or not math.isfinite(value)
      or not (0 < value if field.type == "float" else least <= value)
  ):
    words = "a positive number"
    if field.type == "int":
      words = f"a whole number from {least} on"
    raise _bad_value(field.name, value, words)
  return value


def _bad_value(name: str, value: Any, words: str) -> errors.TargetError:
  return errors.TargetError(
      f"expected {words}, got {name} = {errors.one_line(repr(value), 80)}"
  )


def _quoted(text: str) -> str:
  """Writes a text as a string literal of a text proto."""
  data = "".join(
      chr(byte) if 32 <= byte < 127 and byte not in b'"\\' else f"\\{byte:03o}"
      for byte in text.encode()
  )
  return f'"{data}"'
