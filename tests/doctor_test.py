"""What the doctor makes of machines that we do not have."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import select
import signal
import stat
import sys
import tempfile
import time
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized

from jax_mgpu_ext._src import doctor
from jax_mgpu_ext._src import gpu_probe
from jax_mgpu_ext._src import hooks
from jax_mgpu_ext._src import installed
from jax_mgpu_ext._src import programs
from tests import child


def _python(code: str) -> list[str]:
  return [sys.executable, "-I", "-S", "-c", code]


def _answer(**found) -> str:
  answer = {"platforms": ["cpu"], "devices": [], "error": "", **found}
  return f"print('noise'); print({json.dumps(answer)!r})"


_H100 = "NVIDIA H100 80GB HBM3 (compute capability 9.0)"

# What JAX's process does -> the state, and a piece of what is said.
_ANSWERS = {
    "cpu_only": (_answer(), "none", "only cpu devices"),
    "gpu": (_answer(platforms=["gpu"], devices=[_H100]), "found", ""),
    "error": (_answer(error="RuntimeError: no\n GPU"), "unknown", "no GPU"),
    "crash": ("import os; os.abort()", "unknown", "status -6"),
    "exception": ("raise ImportError('no jaxlib')", "unknown", "no jaxlib"),
    "silence": ("", "unknown", "status 0: it printed nothing"),
    "noise": ("print('hello')", "unknown", "status 0"),
    "hang": ("import time; time.sleep(1000)", "unknown", "in 3 s"),
    # It survives its parent, and holds its pipes open, but not for long.
    "hanging_child": (
        f"import os, time; os.fork() or time.sleep(1000); {_answer()}",
        "none", "only cpu devices",
    ),
    "hanging_daemon": (
        "import os, time; os.fork() or (os.setsid(), time.sleep(1000));"
        f" {_answer()}",
        "none", "only cpu devices",
    ),
}


class GpuProbeTest(parameterized.TestCase):

  @parameterized.named_parameters((n, *case) for n, case in _ANSWERS.items())
  def test_answer(self, code, state, reason):
    start = time.monotonic()
    with programs.started(_python(code)) as process:
      gpu = gpu_probe.answer(process, timeout_s=3)
    self.assertLess(time.monotonic() - start, 30)
    self.assertEqual(gpu.state, state)
    self.assertIn(reason, gpu.reason)
    self.assertNotIn("\n", gpu.reason)
    self.assertEqual(gpu.devices, (_H100,) if state == "found" else ())

  def test_children_are_ended(self):
    with programs.started(_python("import time; time.sleep(1000)")) as process:
      self.assertIsNone(process.poll())
    self.assertIsNotNone(process.poll())

  @parameterized.named_parameters(
      ("in_the_group", "os.fork()"),
      ("in_a_session_of_its_own", "os.fork() or os.setsid()"),
  )
  def test_children_of_children_are_ended(self, fork):
    if "setsid" in fork and sys.platform != "linux":
      self.skipTest("only Linux knows what has left its group")
    # The pipe has an end only once nobody is left who could write to it.
    code = f"import os, time; {fork}; print(1, flush=True); time.sleep(1000)"
    with programs.started(_python(code)) as process:
      for _ in range(2):
        self.assertEqual(os.read(process.stdout.fileno(), 2), b"1\n")
      pipe = os.dup(process.stdout.fileno())
      self.addCleanup(os.close, pipe)
      self.assertEmpty(select.select([pipe], [], [], 0.2)[0])
    self.assertNotEmpty(select.select([pipe], [], [], 30)[0])
    self.assertEqual(os.read(pipe, 1), b"")

  def test_program_ends_with_us(self):
    # Killed, we cannot end it, and it cannot look whether we live.
    code = """
      import os, signal, sys
      from jax_mgpu_ext._src import programs
      hog = "import os, re; print(os.getpid(), flush=True);"
      hog += "re.match('(a+)+$', 'a' * 64 + 'b')"
      with programs.started([sys.executable, "-I", "-S", "-c", hog]) as process:
        print(process.stdout.readline(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = child.run(code)
    self.assertEqual(done.returncode, -signal.SIGKILL, done.stderr)
    self._wait_for_end(int(done.stdout))

  def test_program_ends_with_its_guard(self):
    if sys.platform != "linux":
      self.skipTest("only Linux has PR_SET_PDEATHSIG")
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(1000)"
    with programs.started(_python(code)) as process:
      number = int(process.stdout.readline())
      process.kill()
      self._wait_for_end(number)

  def _wait_for_end(self, number: int):
    deadline = time.monotonic() + 30
    with contextlib.suppress(ProcessLookupError):
      while time.monotonic() < deadline:
        os.kill(number, 0)
        time.sleep(0.05)
      self.fail(f"process {number} still runs")

  def test_status_is_that_of_the_program(self):
    for code, status in (
        ("raise SystemExit(7)", 7),
        ("import os; os.kill(os.getpid(), 15)", -15),
        ("import os; os.kill(os.getpid(), 9)", -9),
    ):
      with programs.started(_python(code)) as process:
        self.assertEqual(process.wait(timeout=60), status)

  @parameterized.named_parameters(
      ("large", 10**9), ("huge", 1e300), ("poll_overflows", 3e6)
  )
  def test_long_limits(self, timeout_s):
    with programs.started(_python("print('x')")) as process:
      self.assertEqual(programs.communicate(process, timeout_s), ("x\n", ""))

  def test_limit_longer_than_one_wait(self):
    with mock.patch.object(programs, "MAX_WAIT_S", 0.01):
      with programs.started(
          _python("import time; time.sleep(0.3); print('x')")
      ) as process:
        self.assertEqual(programs.communicate(process, 60), ("x\n", ""))

  @parameterized.named_parameters(
      ("printed", "print('x')", "x\n"),
      ("failed", "print('x'); raise SystemExit(1)", ""),
      ("hung", "print('x', flush=True); import time; time.sleep(1000)", ""),
  )
  def test_output_of(self, code, expected):
    self.assertEqual(programs.output_of(_python(code), 3), expected)

  def test_output_of_no_program(self):
    self.assertEqual(programs.output_of(["no-such-program-anywhere"]), "")


class InstalledTest(parameterized.TestCase):

  def _tool(self, text: str, folder: str = "bin") -> pathlib.Path:
    root = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    tool = root / folder / "ptxas"
    tool.parent.mkdir(parents=True)
    tool.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    return tool

  @parameterized.named_parameters(
      ("version", "echo 'Cuda tools, release 13.0, V13.0.48'", "13.0.48"),
      ("no_version", "echo 'hello'", ""),
      ("failure", "exit 3", ""),
  )
  def test_finds_a_tool(self, text, version):
    tool = self._tool(text)
    with mock.patch.dict(os.environ, CUDA_HOME=str(tool.parent.parent)):
      found = list(installed.find_tool("ptxas"))
    expected = installed.Tool(name="ptxas", path=str(tool), version=version)
    self.assertIn(expected, found)

  def test_finds_no_tool(self):
    found = list(installed.find_tool("no-such-tool"))
    self.assertEqual(found, [installed.Tool(name="no-such-tool", path=None)])

  @parameterized.named_parameters(
      ("no", {}, ("plugin", "nvcc")),
      ("some", {"nvcc": "13.0"}, ("plugin",)),
      # The plugin has an extra of its own, which jax[cuda] asks for.
      ("most", {"nvcc": "13.0", "plugin": "1"}, ("cublas",)),
      ("all", {"nvcc": "13.0", "plugin": "1", "cublas": "1"}, ()),
  )
  def test_extras(self, present, missing):
    requires = {
        installed.DISTRIBUTION: [
            'jax[cuda,k8s]; extra == "aot"',
            'nvcc>=13; extra == "aot"',
            'pytest; extra == "test"',
            "jax>=0.10.2",
        ],
        "jax": ['plugin[with-cuda]<=1; extra == "cuda"', "numpy>=2"],
        "plugin": [
            "cublas>=1; sys_platform == 'linux' and extra == 'with-cuda'"
        ],
    }
    versions = {"jax": "0.12.0.1", **present}
    with mock.patch.multiple(
        installed.metadata,
        requires=requires.get,
        metadata=lambda name: _Metadata({"Provides-Extra": ["aot"]}),
        version=lambda name: _find(versions, name),
    ):
      extras = list(installed.extras())
    self.assertEqual(extras, [installed.Extra(name="aot", missing=missing)])

  @parameterized.named_parameters(
      ("supported", "0.12.0.1", "supported"),
      ("same_sources", "0.12.0", "supported, same as 0.12.0.1"),
      ("unknown", "0.99.0", "not one of"),
  )
  def test_release(self, version, note):
    with mock.patch.object(installed, "version", lambda name: version):
      package = installed.package("jax")
    self.assertEqual(package.version, version)
    self.assertStartsWith(package.note, note)


class ProblemsTest(parameterized.TestCase):

  @parameterized.named_parameters(
      ("none", {}, ""),
      ("no_jax", {"jax": None}, "jax is not installed"),
      ("release", {"jax": "0.99.0"}, "JAX 0.99.0 is not a supported release"),
      (
          "plugin",
          {"jax-cuda12-plugin": "0.11.2"},
          "jax-cuda12-plugin is 0.11.2, but jax is 0.12.0.1",
      ),
      ("good_plugin", {"jax-cuda12-plugin": "0.12.0.1"}, ""),
  )
  def test_packages(self, versions, expected):
    versions = {"jax": "0.12.0.1", **versions}
    packages = [
        installed.Package(name=name, version=version)
        for name, version in versions.items()
    ]
    self.assertStartsWith(self._problems(packages=packages), expected)

  @parameterized.named_parameters(
      ("applied", "applied", ""),
      ("in_tree", "in tree", ""),
      ("disabled", "disabled", ""),
      ("refused", "refused", "hook x is refused: because"),
      ("failed", "failed", "hook x is failed: because"),
  )
  def test_hooks(self, state, expected):
    status = hooks.HookStatus(slug="x", state=state, reason="because")
    self.assertEqual(self._problems(states=[status]), expected)

  def test_gpu_without_plugin(self):
    gpu = gpu_probe.Gpu(state="none", driver=("NVIDIA H100, 9.0, 590.1",))
    with mock.patch.dict(os.environ):
      os.environ.pop("JAX_PLATFORMS", None)
      self.assertIn("[cuda12]", self._problems(gpu=gpu))
      os.environ["JAX_PLATFORMS"] = "cpu"  # It was asked for.
      self.assertEqual(self._problems(gpu=gpu), "")

  def _problems(self, **changes) -> str:
    facts = {
        "packages": [installed.Package(name="jax", version="0.12.0.1")],
        "states": [],
        "hooks_error": "",
        "gpu": gpu_probe.Gpu(state="none"),
        **changes,
    }
    return "\n".join(doctor.find_problems(**facts))


class VariablesTest(absltest.TestCase):

  def test_shows_what_matters_and_nothing_else(self):
    environ = {"XLA_FLAGS": "--x", "JAX_MGPU_EXT": "on", "SECRET": "s"}
    expected = {
        "JAX_MGPU_EXT": "on",
        "JAX_MGPU_EXT_CACHE_DIR": None,
        "JAX_MGPU_EXT_DISABLE": None,
        "XLA_FLAGS": "--x",
    }
    with mock.patch.dict(os.environ, environ, clear=True):
      self.assertEqual(doctor.variables(), expected)


@dataclasses.dataclass
class _Metadata:
  """As much of `email.message.Message` as is used."""

  fields: dict[str, list[str]]

  def get_all(self, name: str) -> list[str] | None:
    return self.fields.get(name)


def _find(versions: dict[str, str], name: str) -> str:
  if name not in versions:
    raise installed.metadata.PackageNotFoundError(name)
  return versions[name]


if __name__ == "__main__":
  absltest.main()
