"""An extension of JAX's Pallas Mosaic GPU backend.

Importing it activates the hooks (see `docs/hooks.md`) unless the environment
says `JAX_MGPU_EXT=off`. It imports neither JAX nor Pallas: the hooks are
applied when, and if, the program imports Pallas. Public names are loaded when
they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from jax_mgpu_ext._src import config as _config
from jax_mgpu_ext._src import errors as _errors
from jax_mgpu_ext._src import hooks as _hooks
from jax_mgpu_ext._src import launch as _launch

if TYPE_CHECKING:
  from jax_mgpu_ext import aot as aot
  from jax_mgpu_ext import avals as avals
  from jax_mgpu_ext import budget as budget
  from jax_mgpu_ext import check as check
  from jax_mgpu_ext import hooks as hooks
  from jax_mgpu_ext import kernels as kernels
  from jax_mgpu_ext import specs as specs
  from jax_mgpu_ext import targets as targets
  from jax_mgpu_ext._src.avals import array_aval as array_aval
  from jax_mgpu_ext._src.avals import array_avals as array_avals
  from jax_mgpu_ext._src.avals import ref_aval as ref_aval
  from jax_mgpu_ext._src.avals import ref_avals as ref_avals
  from jax_mgpu_ext._src.avals import register_spec as register_spec
  from jax_mgpu_ext._src.avals import unregister_spec as unregister_spec
  from jax_mgpu_ext._src.check import kernel_case as kernel_case
  from jax_mgpu_ext._src.errors import SpecError as SpecError
  from jax_mgpu_ext._src.hooks import activate as activate
  from jax_mgpu_ext._src.hooks import activated as activated
  from jax_mgpu_ext._src.hooks import deactivate as deactivate
  from jax_mgpu_ext._src.hooks import status as status

__version__ = "0.1.0"

# Public name -> the module that holds it; a module's own name stands for it.
_PUBLIC = {
    "activate": "_src.hooks",
    "activated": "_src.hooks",
    "deactivate": "_src.hooks",
    "status": "_src.hooks",
    "ref_aval": "_src.avals",
    "ref_avals": "_src.avals",
    "array_aval": "_src.avals",
    "array_avals": "_src.avals",
    "register_spec": "_src.avals",
    "unregister_spec": "_src.avals",
    "SpecError": "_src.errors",
    "kernel_case": "_src.check",
    "aot": "",
    "avals": "",
    "budget": "",
    "check": "",
    "hooks": "",
    "kernels": "",
    "specs": "",
    "targets": "",
}

__all__ = tuple(_PUBLIC)


def __getattr__(name: str):
  if name not in _PUBLIC:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  if not _PUBLIC[name]:
    return importlib.import_module(f"{__name__}.{name}")
  module = importlib.import_module(f"{__name__}.{_PUBLIC[name]}")
  value = getattr(module, name)
  globals()[name] = value
  return value


def __dir__():
  return sorted({*globals(), *_PUBLIC})


try:
  if _config.settings(_hooks.SLUGS).mode != "off":
    _hooks.activate()
except _errors.ConfigError:
  if not _launch.is_own_command():  # Which says the same in one line.
    raise
