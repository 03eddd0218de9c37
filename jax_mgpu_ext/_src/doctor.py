"""Collects what there is to know about an installation, as data.

`mgpu-ext doctor` prints it (see `report.py`). Nothing here raises because
something is missing or broken: that is what one asks a doctor about.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import contextlib
import dataclasses
import importlib
import os
import platform
import re
import sys
from typing import Any

from jax_mgpu_ext._src import config
from jax_mgpu_ext._src import gpu_probe
from jax_mgpu_ext._src import hooks
from jax_mgpu_ext._src import installed
from jax_mgpu_ext._src import releases
from jax_mgpu_ext._src import texts

PACKAGES = (
    installed.DISTRIBUTION,
    "jax",
    "jaxlib",
    "jax-cuda12-plugin",
    "jax-cuda12-pjrt",
    "jax-cuda13-plugin",
    "jax-cuda13-pjrt",
    "numpy",
    "wrapt",
)
TOOLS = ("ptxas", "nvdisasm", "nvcc")
# Shown even when they are not set.
OUR_VARIABLES = (
    config.MODE_VARIABLE, config.DISABLE_VARIABLE, config.CACHE_DIR_VARIABLE
)
# Shown when they are set, since they change what JAX or Mosaic does.
_VARIABLES = re.compile(
    r"(JAX|XLA|MOSAIC_GPU|PALLAS|CUDA|NVIDIA_VISIBLE)_.*|LD_LIBRARY_PATH"
)
_MOSAIC = "jax.experimental.pallas.mosaic_gpu"
# Imported by JAX when a kernel is interpreted.
_INTERPRETER = "jax._src.pallas.mosaic_gpu.interpret.jaxpr_interpret"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
  """Everything that `mgpu-ext doctor` tells.

  Attributes:
    python: Its version.
    executable: The Python that runs.
    system: Operating system and processor.
    packages: The distributions that matter, installed or not.
    extras: This package's extras; empty where it is not installed, but run
      from its sources.
    tools: The CUDA programs, each as often as it was found.
    gpu: What there is to run on.
    hooks: The hooks' final states.
    hooks_error: Why the states are not final, empty if they are.
    variables: The environment variables that change what happens.
    problems: What should be mended, in words; empty if all is well.
  """

  python: str
  executable: str
  system: str
  packages: tuple[installed.Package, ...]
  extras: tuple[installed.Extra, ...]
  tools: tuple[installed.Tool, ...]
  gpu: gpu_probe.Gpu
  hooks: tuple[hooks.HookStatus, ...]
  hooks_error: str
  variables: dict[str, str | None]
  problems: tuple[str, ...]

  def to_json(self) -> dict[str, Any]:
    """Returns the facts as plain lists, dicts and strings."""
    return dataclasses.asdict(self)


def collect(gpu_timeout_s: float = 60.0) -> Facts:
  """Looks at everything.

  Args:
    gpu_timeout_s: How long JAX may take to find its devices, in seconds.
  """
  environment = variables()  # Now: importing Mosaic sets some of them.
  with gpu_probe.started() as process:  # Runs while the rest is looked at.
    packages = tuple(map(installed.package, PACKAGES))
    extras = tuple(installed.extras())
    tools = tuple(t for name in TOOLS for t in installed.find_tool(name))
    states, hooks_error = hook_states()
    gpu = gpu_probe.answer(process, gpu_timeout_s)
  return Facts(
      python=platform.python_version(),
      executable=sys.executable,
      system=f"{platform.system()} {platform.release()}, {platform.machine()}",
      packages=packages,
      extras=extras,
      tools=tools,
      gpu=gpu,
      hooks=states,
      hooks_error=hooks_error,
      variables=environment,
      problems=tuple(find_problems(packages, states, hooks_error, gpu)),
  )


def hook_states() -> tuple[tuple[hooks.HookStatus, ...], str]:
  """Imports Pallas Mosaic GPU and returns the hooks' final states.

  A refused hook is reported, not raised, under `JAX_MGPU_EXT=strict` too.

  Returns:
    The states, and why they are not final, empty if they are.
  """
  error = ""
  with contextlib.ExitStack() as stack:
    if hooks.is_active() and is_strict():
      hooks.deactivate()
      stack.enter_context(_variable(config.MODE_VARIABLE, "on"))
      hooks.activate()
    try:
      importlib.import_module(_MOSAIC)
      importlib.import_module(_INTERPRETER)
    except Exception as e:  # pylint: disable=broad-exception-caught
      error = f"cannot import {_MOSAIC}: {one_line(e)}"
  return tuple(hooks.status()), error


def hooks_json(
    states: Sequence[hooks.HookStatus], error: str
) -> dict[str, Any]:
  """Returns what `hook_states()` gave as plain lists, dicts and strings."""
  return {"hooks": [dataclasses.asdict(s) for s in states], "error": error}


def is_strict() -> bool:
  """Returns whether a refused hook is an error."""
  return config.settings(hooks.SLUGS).mode == "strict"


def one_line(error: BaseException) -> str:
  """Returns an exception as one line."""
  text = " ".join(texts.text_of(error).split())
  name = type(error).__name__
  return f"{name}: {text}" if text else name


def variables() -> dict[str, str | None]:
  """Returns the environment variables that change what happens."""
  found: dict[str, str | None] = {v: os.environ.get(v) for v in OUR_VARIABLES}
  for name in sorted(os.environ):
    if _VARIABLES.fullmatch(name):
      found[name] = os.environ[name]
  return found


def find_problems(
    packages: Sequence[installed.Package],
    states: Sequence[hooks.HookStatus],
    hooks_error: str,
    gpu: gpu_probe.Gpu,
) -> Iterator[str]:
  """Yields what should be mended, one sentence each."""
  versions = {package.name: package.version for package in packages}
  jax = versions["jax"]
  if jax is None:
    yield "jax is not installed: pip install jax"
  elif releases.canonical(jax) not in releases.SUPPORTED:
    yield (
        f"JAX {jax} is not a supported release"
        f" ({', '.join(releases.SUPPORTED)}); only hooks whose targets look as"
        " in one of these are applied"
    )
  for name, found in versions.items():
    if jax and found and re.fullmatch(r"jax-cuda\d+-(plugin|pjrt)", name):
      if found != jax:
        yield f"{name} is {found}, but jax is {jax}: install the same version"
  if hooks_error:
    yield hooks_error
  for status in states:
    if status.state in ("refused", "failed"):
      yield f"hook {status.slug} is {status.state}: {status.reason}"
  if gpu.state == "unknown":
    yield f"no answer about GPUs: {gpu.reason}"
  elif gpu.state == "none" and gpu.driver and "JAX_PLATFORMS" not in os.environ:
    yield (
        "the driver lists a GPU that JAX cannot use: pip install"
        f" '{installed.DISTRIBUTION}[cuda12]'"
    )


@contextlib.contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
  """Sets an environment variable for a `with` block."""
  before = os.environ.get(name)
  os.environ[name] = value
  try:
    yield
  finally:
    if before is None:
      del os.environ[name]
    else:
      os.environ[name] = before
