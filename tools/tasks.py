"""What `make` can do; `make help` lists it.

Needs only the standard library and starts under any Python from 3.9 on,
whatever Python the environments need.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

import environments
from environments import Environment
from environments import Releases
from environments import ROOT
from environments import say
import interpreters
from interpreters import UserError

MAX_WORKERS = 8  # Each loads a JAX of its own.


def default_environment(releases: Releases) -> Environment:
  """Returns `.venv`, ready to use.

  It has the default release, or the newest one that the Python at hand can run.

  Raises:
    UserError: No Python here can run any supported release.
  """
  named = interpreters.named()
  for release in reversed(releases.supported):
    needed = releases.pythons[release]
    python = named or interpreters.find(needed)
    if python and (
        interpreters.minor(python.version) >= interpreters.minor(needed)
    ):
      break
  else:
    oldest = releases.supported[0]
    raise UserError(
        f"expected Python {releases.pythons[releases.default]} (or"
        f" {releases.pythons[oldest]}, which runs JAX {oldest}), got"
        f" {f'PYTHON={named.path} ({named.version})' if named else 'neither'}."
        " Install it, or name a later Python: make test PYTHON=python3.13"
    )
  if release != releases.default:
    say(
        f".venv has JAX {release}, the newest that Python {python.version} can"
        f" run; JAX {releases.default} needs Python"
        f" {releases.pythons[releases.default]}"
    )
  environment = Environment(ROOT / ".venv", release, python)
  environment.prepare()
  return environment


def release_environment(release: str, releases: Releases) -> Environment:
  """Returns the environment of one release, ready to use.

  That is `.venv` where it has, or by default would have, that release.
  """
  folder = ROOT / ".venv"
  held = environments.read_stamp(folder).get("release", releases.default)
  if held != release:
    folder = ROOT / f".venv-{release}"
  python = interpreters.find(releases.pythons[release])
  environment = Environment(folder, release, python)
  environment.prepare()
  return environment


def wanted_releases(releases: Releases) -> list[str]:
  """Returns the releases that RELEASES names: all, others, or a list.

  Raises:
    UserError: One is not supported, or has no Python here.
  """
  words = os.environ.get("RELEASES", "").replace(",", " ").split()
  if words in ([], ["all"]):
    words = list(releases.supported)
  elif words == ["others"]:
    words = [r for r in releases.supported if r != releases.default]
  if unknown := [word for word in words if word not in releases.supported]:
    raise UserError(
        "expected RELEASES to be all, others, or some of"
        f" {', '.join(releases.supported)}, got {', '.join(unknown)}"
    )
  missing = [r for r in words if not interpreters.find(releases.pythons[r])]
  if missing:
    needs = ", ".join(
        f"Python {releases.pythons[r]} (JAX {r})" for r in missing
    )
    rest = " ".join(r for r in words if r not in missing)
    raise UserError(
        f"no {needs} here, so nothing was run. Install it"
        + (f', or run: make test-releases RELEASES="{rest}"' if rest else "")
    )
  return words


def run(command: list[str]) -> int:
  """Runs a command in the clone, on the CPU unless JAX_PLATFORMS is set."""
  environ = {"JAX_PLATFORMS": "cpu", **interpreters.clean_environ()}
  interrupted = False
  with subprocess.Popen(command, cwd=ROOT, env=environ) as child:
    while child.poll() is None:
      try:
        child.wait()
      except KeyboardInterrupt:
        interrupted = True  # The child got it too, and knows how to end.
  if interrupted:
    raise KeyboardInterrupt
  return child.returncode if child.returncode >= 0 else 128 - child.returncode


def run_suite(environment: Environment, args: list[str]) -> int:
  """Runs the tests on the cores at hand; returns pytest's status."""
  name = f"JAX {environment.release}, Python {environment.interpreter.version}"
  say(f"the suite with {name}")
  if hasattr(os, "sched_getaffinity"):
    cores = len(os.sched_getaffinity(0))
  else:
    cores = os.cpu_count() or 1
  return run([
      environment.python, "-m", "pytest",
      "-n", str(min(cores, MAX_WORKERS)), "--dist", "worksteal", *args,
  ])


def check(args: list[str]) -> int:
  """`mgpu-ext check`: over the shipped kernels, or what ARGS names."""
  environment = default_environment(environments.read_releases())
  return run([environment.python, "-m", "jax_mgpu_ext", "check", *args])


def test(args: list[str]) -> int:
  """The suite on the default release of JAX."""
  return run_suite(default_environment(environments.read_releases()), args)


def test_releases(args: list[str]) -> int:
  """The suite on every release that RELEASES names."""
  releases = environments.read_releases()
  statuses = {}
  for release in wanted_releases(releases):
    statuses[release] = run_suite(release_environment(release, releases), args)
  for release, status in statuses.items():
    say(f"JAX {release}: {f'failed, status {status}' if status else 'passed'}")
  return max(statuses.values())


def clean(args: list[str]) -> int:
  """Removes the environments, and what tests and tools leave."""
  del args
  with environments.lock():
    for folder in ROOT.glob(".venv*"):
      ours = (folder / environments.STAMP).exists()
      if ours or folder.name.endswith("-trash"):
        environments.remove(folder)
    for name in (".pytest_cache", ".hypothesis", "build", "dist"):
      environments.remove(ROOT / name)
    for folder in ROOT.glob("[!.]*/**/__pycache__"):
      environments.remove(folder)
  return 0


COMMANDS = {
    "check": check,
    "test": test,
    "test-releases": test_releases,
    "clean": clean,
}


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("command", choices=COMMANDS)
  parser.add_argument("args", nargs=argparse.REMAINDER)
  parsed = parser.parse_args()
  try:
    return COMMANDS[parsed.command](parsed.args)
  except UserError as e:
    print(f"environments: error: {e}", file=sys.stderr)
    return 2
  except KeyboardInterrupt:
    print("environments: interrupted", file=sys.stderr)
    return 130


if __name__ == "__main__":
  sys.exit(main())
