"""The package's environment variables, read and validated in one place."""

from __future__ import annotations

import dataclasses
import os

from jax_mgpu_ext._src import errors

MODE_VARIABLE = "JAX_MGPU_EXT"
DISABLE_VARIABLE = "JAX_MGPU_EXT_DISABLE"
CACHE_DIR_VARIABLE = "JAX_MGPU_EXT_CACHE_DIR"
MODES = ("on", "off", "strict")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """What the environment asks for.

  Attributes:
    mode: `on` (default): hooks are applied, a refused hook is only reported;
      `strict`: a refused hook is an error; `off`: importing activates nothing.
    disabled: Slugs of hooks that must not be applied.
  """

  mode: str = "on"
  disabled: frozenset[str] = frozenset()


def settings(known_slugs: tuple[str, ...]) -> Settings:
  """Returns the settings of the environment as it is now.

  Args:
    known_slugs: Every hook slug that may be named.

  Raises:
    ConfigError: A variable has a value that is not legal.
  """
  mode = os.environ.get(MODE_VARIABLE, "").strip().lower() or "on"
  if mode not in MODES:
    raise errors.ConfigError(
        f"{MODE_VARIABLE} must be one of {', '.join(MODES)}, got"
        f" {MODE_VARIABLE}={os.environ[MODE_VARIABLE]!r}. Unset it or set one"
        f" of these values [{errors.ConfigError.code}]"
    )
  names = os.environ.get(DISABLE_VARIABLE, "").split(",")
  disabled = frozenset(name.strip() for name in names if name.strip())
  if unknown := sorted(disabled - set(known_slugs)):
    raise errors.ConfigError(
        f"{DISABLE_VARIABLE} must name hooks, separated by commas, got"
        f" {', '.join(map(repr, unknown))}. The hooks are:"
        f" {', '.join(known_slugs)} [{errors.ConfigError.code}]"
    )
  return Settings(mode=mode, disabled=disabled)


def cache_dir() -> str | None:
  """Returns the folder that the environment names for compiled kernels.

  Raises:
    ConfigError: It is not an absolute path.
  """
  named = os.environ.get(CACHE_DIR_VARIABLE, "").strip()
  if not named:
    return None
  if not os.path.isabs(named):
    raise errors.ConfigError(
        f"{CACHE_DIR_VARIABLE} must be an absolute path, got"
        f" {CACHE_DIR_VARIABLE}={named!r}. Unset it or write the whole path"
        f" [{errors.ConfigError.code}]"
    )
  return named
