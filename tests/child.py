"""Runs Python in a child process, for effects that last as long as a process."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import textwrap

_ROOT = pathlib.Path(__file__).resolve().parents[1]


def run(
    code: str, *args: str, env: dict[str, str] | None = None, timeout_s=120.0
) -> subprocess.CompletedProcess:
  """Runs a snippet; variables of ours that the parent has do not reach it."""
  clean = {
      name: value
      for name, value in os.environ.items()
      if not name.startswith("JAX_MGPU") or name == "JAX_MGPU_EXT_CACHE_DIR"
  }
  paths = [str(_ROOT), *filter(None, [clean.get("PYTHONPATH")])]
  return subprocess.run(
      [sys.executable, "-c", textwrap.dedent(code), *args],
      env={
          **clean,
          "JAX_PLATFORMS": "cpu",
          "PYTHONPATH": os.pathsep.join(paths),
          **(env or {}),
      },
      capture_output=True,
      text=True,
      timeout=timeout_s,
      check=False,
  )


def check_output(code: str, *args: str, **kwargs) -> str:
  """As `run`, but returns stdout, and fails with stderr unless all is well."""
  result = run(code, *args, **kwargs)
  if result.returncode:
    raise AssertionError(f"exit {result.returncode}\n{result.stderr}")
  return result.stdout
