"""What compiling without a GPU needs, and whether it is there."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from importlib import util
import os
import shutil
import threading
from typing import Any

from jax_mgpu_ext._src import errors
from jax_mgpu_ext._src import installed

_PIP = f"pip install '{installed.DISTRIBUTION}[aot]'"
# XLA's plugin for CUDA 12 or 13, whichever is installed; the one of the extra
# `aot` first.
_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")
_SKIP_CHECK = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
_lock = threading.Lock()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Toolchain:
  """The compiler, as far as it can be seen from outside.

  Attributes:
    versions: What decides on the code that comes out: name -> version.
    nvdisasm: Path of the disassembler, or None.
  """

  versions: dict[str, str]
  nvdisasm: str | None


def find(*, sass: bool) -> Toolchain:
  """Returns the tools that are installed.

  Args:
    sass: Whether the disassembler is needed.

  Raises:
    AotUnavailableError: Something is missing; says how to install it.
  """
  import jax  # pylint: disable=g-import-not-at-top

  found = {name: installed.version(name) for name in _PLUGINS}
  plugin = next((name for name, version in found.items() if version), None)
  if plugin is None:
    raise errors.AotUnavailableError(
        "compiling without a GPU needs XLA's CUDA plugin, and neither"
        f" {' nor '.join(_PLUGINS)} is installed: {_PIP}"
    )
  pjrt = plugin.replace("plugin", "pjrt")
  for name in (plugin, pjrt):
    version = installed.version(name)
    if version != jax.__version__:
      raise errors.AotUnavailableError(
          f"expected {name} {jax.__version__}, the version of jax, got"
          f" {version or 'none'}: pip install '{name}=={jax.__version__}'"
      )
  if util.find_spec("flatbuffers") is None:
    raise errors.AotUnavailableError(
        "compiling without a GPU needs the package flatbuffers, which is not"
        f" installed: {_PIP}"
    )
  nvdisasm = next(iter(installed.tool_paths("nvdisasm")), None)
  if sass and nvdisasm is None:
    raise errors.AotUnavailableError(
        "SASS needs the disassembler nvdisasm, which was not found: pip install"
        " nvidia-cuda-nvdisasm, or pass sass=False for PTX alone"
    )
  versions = {
      "jax": jax.__version__,
      "jaxlib": installed.version("jaxlib") or "",
      plugin: found[plugin] or "",
      pjrt: installed.version(pjrt) or "",
      "ptxas": _fingerprint(ptxas()),
      "nvdisasm": _fingerprint(nvdisasm) if sass else "",
  }
  return Toolchain(versions=versions, nvdisasm=nvdisasm)


def ptxas() -> str | None:
  """Returns the assembler that the compilers' processes use.

  That is the one of the CUDA packages that JAX has found, else the first in PATH;
  None: XLA's own.
  """
  from jax._src import lib  # pylint: disable=g-import-not-at-top

  if lib.cuda_path is not None:
    path = os.path.join(lib.cuda_path, "bin", "ptxas")
    if os.access(path, os.X_OK):
      return path
  return shutil.which("ptxas")


def _fingerprint(path: str | None) -> str:
  """Returns what tells one build of a program from another."""
  if path is None:
    return ""
  try:
    status = os.stat(path)
  except OSError:
    return path
  return f"{path} {status.st_size} {status.st_mtime_ns}"


@functools.cache
def device(config: str) -> Any:
  """Returns a device that can only be compiled for.

  Args:
    config: XLA's description of the GPU, `Target.xla_target_config()`.
  """
  with _lock:
    try:
      return _device(config)
    except NotImplementedError:
      _register_plugin()
      return _device(config)


def _device(config: str) -> Any:
  from jax.experimental import topologies  # pylint: disable=g-import-not-at-top

  # Without a topology it would ask for a client, without a configuration for
  # a GPU.
  [found] = topologies.get_topology_desc(
      platform="cuda", topology="1x1x1", target_config=config
  ).devices
  return found


def _register_plugin() -> None:
  """Registers XLA's plugin, which found no libraries to run kernels with.

  It registers itself only if cuDNN, cuBLAS and others are there, unless this
  process has said that it wants no GPU, or that it is not to look.
  """
  import jax  # pylint: disable=g-import-not-at-top

  jax.local_devices()  # What JAX runs on is decided without us, so before.
  before = os.environ.get(_SKIP_CHECK)
  os.environ[_SKIP_CHECK] = "1"
  try:
    for name in ("xla_cuda12", "xla_cuda13"):
      if util.find_spec(f"jax_plugins.{name}") is not None:
        importlib.import_module(f"jax_plugins.{name}").initialize()
        return
  finally:
    if before is None:
      del os.environ[_SKIP_CHECK]
    else:
      os.environ[_SKIP_CHECK] = before
