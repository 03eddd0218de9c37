"""Asks JAX and the driver which GPUs there are."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys

from jax_mgpu_ext._src import programs

# Run in a child process: starting a GPU backend takes seconds, reserves most of
# the GPU's memory, and with a broken driver may never come back.
_PROGRAM = """
import json
import jax
try:
  devices, error = jax.devices(), ""
except Exception as e:
  devices, error = [], f"{type(e).__name__}: {e}"
print(json.dumps({
    "platforms": sorted({d.platform for d in devices}),
    "devices": [
        f"{d.device_kind} (compute capability {d.compute_capability})"
        for d in devices if hasattr(d, "compute_capability")
    ],
    "error": error,
}))
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
  """What JAX and the driver say about GPUs.

  Attributes:
    state: `found`, `none`, or `unknown` if JAX gave no answer.
    devices: JAX's GPUs, each with its compute capability.
    reason: Why there is none, or no answer.
    driver: The GPUs that `nvidia-smi` lists, with the driver's version.
  """

  state: str
  devices: tuple[str, ...] = ()
  reason: str = ""
  driver: tuple[str, ...] = ()


def started() -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
  """Starts asking JAX; the answer is for `answer()`."""
  return programs.started([sys.executable, "-c", _PROGRAM])


def answer(process: subprocess.Popen[str], timeout_s: float) -> Gpu:
  """Returns JAX's answer and the driver's.

  Args:
    process: What `started()` gave.
    timeout_s: How long to wait for JAX, in seconds.
  """
  listing = programs.output_of([
      "nvidia-smi",
      "--query-gpu=name,compute_cap,driver_version",
      "--format=csv,noheader",
  ])
  driver = tuple(line.strip() for line in listing.splitlines() if line.strip())
  state, devices, reason = _answer_of_jax(process, timeout_s)
  return Gpu(state=state, devices=devices, reason=reason, driver=driver)


def _answer_of_jax(
    process: subprocess.Popen[str], timeout_s: float
) -> tuple[str, tuple[str, ...], str]:
  try:
    output, complaints = programs.communicate(process, timeout_s)
  except subprocess.TimeoutExpired:
    return "unknown", (), f"JAX did not find its devices in {timeout_s:g} s"
  try:
    found = json.loads(output.splitlines()[-1])
  except (IndexError, ValueError):
    last = complaints.strip().splitlines()[-1:] or ["it printed nothing"]
    return "unknown", (), f"status {process.returncode}: {last[0]}"
  if found["error"]:
    return "unknown", (), " ".join(found["error"].split())
  if found["devices"]:
    return "found", tuple(found["devices"]), ""
  reason = f"JAX has only {', '.join(found['platforms'])} devices"
  if chosen := os.environ.get("JAX_PLATFORMS"):
    reason += f" (JAX_PLATFORMS={chosen})"
  return "none", (), reason
