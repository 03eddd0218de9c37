"""How `mgpu-ext` answers and ends, seen from outside, in child processes."""

from __future__ import annotations

import io
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized

import jax_mgpu_ext
from jax_mgpu_ext._src import catalog
from jax_mgpu_ext._src import cli
from jax_mgpu_ext._src import hooks
from jax_mgpu_ext._src import releases

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_COMMAND = (sys.executable, "-m", "jax_mgpu_ext")
_SHIPPED_CASE = "jax_mgpu_ext.kernels.peer_exchange::peer_exchange[float32]"

_FILES = {
    "empty.py": "",
    "broken.py": "import no_such_module_of_anybody",
    "syntax.py": "def f(:",
    "failing.py": """
        from jax_mgpu_ext.check import kernel_case

        @kernel_case(inputs=lambda rng: (), reference=lambda: 0)
        def no_kernel(interpret=None):
          print("printed by the case")
          raise ValueError("no kernel today")
    """,
    "endless.py": """
        import pathlib
        import time

        from jax_mgpu_ext.check import kernel_case

        @kernel_case(inputs=lambda rng: (), reference=lambda: 0)
        def no_end(interpret=None):
          pathlib.Path(__file__).with_suffix(".started").touch()
          time.sleep(1000)
    """,
    "escapes.py": r"""
        raise ValueError("\x1b[2J\x1b[31mPWNED\x07" + "x" * 5_000_000)
    """,
    "notes.txt": "",
}

# What is asked -> pieces of the one line that answers it.
_BAD = {
    "unknown_command": (["chekc"], ["'chekc'", "check"]),
    "unknown_option": (["hooks", "--jsno"], ["--jsno", "mgpu-ext hooks"]),
    "unknown_option_at_the_top": (["--jsno"], ["--jsno", "--help"]),
    "extra_argument": (["doctor", "now"], ["now"]),
    "jobs_of_none": (["check", "--jobs", "0"], ["--jobs", "from 1", "'0'"]),
    "jobs_is_a_word": (["check", "--jobs", "two"], ["--jobs", "'two'"]),
    "jobs_is_too_long": (["check", "--jobs", "9" * 5000], ["--jobs", "from 1"]),
    "time_is_infinite": (["check", "--timeout-s", "1e999"], ["'1e999'"]),
    "escapes_in_an_argument": (
        ["check", "\x1b[2J.py"], ["no file '\\x1b[2J.py'"],
    ),
    "escapes_in_a_command": (["\x9b2J\u202e"], ["\\x9b2J\\u202e"]),
    "escapes_in_a_message": (
        ["check", "escapes.py"], [r"\x1b[2J\x1b[31mPWNED\x07xxx", "line 2)"],
    ),
    "jobs_is_missing": (["check", "--jobs"], ["--jobs"]),
    "time_is_nan": (["check", "--timeout-s", "nan"], ["seconds", "'nan'"]),
    "time_is_negative": (["check", "--timeout-s=-1"], ["seconds", "'-1'"]),
    "time_is_a_word": (["doctor", "--gpu-timeout-s=soon"], ["'soon'"]),
    "no_such_file": (["check", "missing.py"], ["missing.py"]),
    "no_such_file_as_json": (["check", "missing.py", "--json"], ["missing.py"]),
    "not_a_python_file": (["check", "notes.txt"], ["notes.txt", ".py"]),
    "no_such_module": (["check", "no_such.module"], ["no_such.module"]),
    "no_cases": (["check", "empty.py"], ["no cases", "empty.py"]),
    "import_error": (
        ["check", "broken.py"],
        ["broken.py", "no_such_module_of_anybody"],
    ),
    "syntax_error": (["check", "syntax.py"], ["syntax.py"]),
    "no_such_case": (
        ["check", "failing.py::kernel"],
        ["'kernel'", "no_kernel"],
    ),
    "no_such_stage": (["check", "--stage", "spec"], ["'spec'", "specs"]),
    "no_such_target": (["check", "--target", "a100"], ["'a100'", "h100"]),
    "nothing_to_explain": (["explain"], ["a code", "--list"]),
    "only_blanks_to_explain": (["explain", "  "], ["a code", "--list"]),
    "text_and_list": (["explain", "MGPU011", "--list"], ["--list", "both"]),
    "no_such_code": (["explain", "MGPU999"], ["'MGPU999'", "--list"]),
    "no_such_message": (["explain", "zork frobnicated"], ["zork", "--list"]),
    "no_such_message_as_json": (["explain", "--json", "zork"], ["zork"]),
}

_BAD_ENVIRONMENTS = {
    "mode": ({"JAX_MGPU_EXT": "maybe"}, ["JAX_MGPU_EXT", "strict", "'maybe'"]),
    "slug": (
        {"JAX_MGPU_EXT_DISABLE": "ref_unions,bogus"},
        ["JAX_MGPU_EXT_DISABLE", "'bogus'", "aval_dispatch"],
    ),
}

_GOOD_ENVIRONMENTS = {
    "mode": {"JAX_MGPU_EXT": "strict"},
    "mode_off": {"JAX_MGPU_EXT": "off"},
    "slug": {"JAX_MGPU_EXT_DISABLE": "ref_unions, transforms"},
}


def _environ(extra: dict[str, str] | None = None) -> dict[str, str]:
  clean = {k: v for k, v in os.environ.items() if not k.startswith("JAX_MGPU")}
  paths = [str(_ROOT), *filter(None, [clean.get("PYTHONPATH")])]
  return {
      **clean,
      "JAX_PLATFORMS": "cpu",
      "PYTHONPATH": os.pathsep.join(paths),
      **(extra or {}),
  }


def _wait_for(path: pathlib.Path) -> None:
  """Returns when a file is there, or after a minute."""
  deadline = time.monotonic() + 60
  while not path.exists() and time.monotonic() < deadline:
    time.sleep(0.05)


class CliTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    folder = tempfile.TemporaryDirectory()
    cls.addClassCleanup(folder.cleanup)
    cls.folder = folder.name
    for name, text in _FILES.items():
      path = pathlib.Path(cls.folder, name)
      path.write_text(textwrap.dedent(text), encoding="utf-8")

  def run_command(self, *args, env=None, command=_COMMAND, **kwargs):
    return subprocess.run(
        [*command, *args],
        cwd=self.folder,
        env=_environ(env),
        stdin=subprocess.DEVNULL,
        capture_output="stdout" not in kwargs,
        text=True,
        timeout=240,
        check=False,
        **kwargs,
    )

  def output_of(self, *args, status=0, **kwargs):
    done = self.run_command(*args, **kwargs)
    self.assertEqual(done.returncode, status, done.stderr)
    self.assertNotIn("Traceback", done.stderr)
    return done.stdout

  def assert_one_line(self, done, status, pieces):
    self.assertEqual(done.returncode, status, done.stderr)
    self.assertEqual(done.stdout, "")
    self.assertRegex(done.stderr, r"\Amgpu-ext: error: [^\n]+\n\Z")
    self.assertTrue(done.stderr.rstrip("\n").isprintable())
    self.assertLess(len(done.stderr), 3000)
    for piece in pieces:
      self.assertIn(piece, done.stderr)

  # What cannot be done.

  @parameterized.named_parameters((n, *case) for n, case in _BAD.items())
  def test_bad_request(self, args, pieces):
    self.assert_one_line(self.run_command(*args), 2, pieces)

  @parameterized.named_parameters(
      (n, *case) for n, case in _BAD_ENVIRONMENTS.items()
  )
  def test_bad_environment(self, env, pieces):
    done = self.run_command("explain", "--list", env=env)
    self.assert_one_line(done, 2, pieces)

  @parameterized.named_parameters(
      (n, *case) for n, case in _BAD_ENVIRONMENTS.items()
  )
  def test_bad_environment_outside_the_command(self, env, pieces):
    command = (sys.executable, "-c", "import jax_mgpu_ext")
    done = self.run_command(env=env, command=command)
    self.assertEqual(done.returncode, 1)
    self.assertIn("ConfigError: ", done.stderr)
    for piece in pieces:
      self.assertIn(piece, done.stderr)

  @parameterized.named_parameters(*_GOOD_ENVIRONMENTS.items())
  def test_good_environment(self, env):
    states = json.loads(self.output_of("hooks", "--json", env=env))["hooks"]
    disabled = env.get("JAX_MGPU_EXT_DISABLE", "")
    for status in states:
      if env.get("JAX_MGPU_EXT") == "off":
        self.assertEqual(status["state"], "off")
      elif status["slug"] in disabled:
        self.assertEqual(status["state"], "disabled")
      else:
        self.assertIn(status["state"], ("applied", "not needed"))

  # explain

  def test_explains_a_code_without_jax(self):
    code = """
      import sys
      from jax_mgpu_ext._src import cli
      status = cli.main(sys.argv[1:])
      loaded = [m for m in sys.modules if m.split(".")[0] in ("jax", "numpy")]
      sys.exit(f"loaded {loaded}" if loaded else status)
    """
    command = (sys.executable, "-c", textwrap.dedent(code))
    stdout = self.output_of("explain", "mgpu011", command=command)
    entry = catalog.get("MGPU011")
    for text in (entry.code, entry.title, entry.exception, entry.hook):
      self.assertIn(text, stdout)
    for text in (entry.meaning, *entry.situations, *entry.fixes):
      self.assertIn(text, stdout)
    for line in (entry.before + "\n" + entry.after).split("\n"):
      self.assertIn(f"  {line}".rstrip() + "\n", stdout)

  def test_explains_a_message(self):
    # In words of their own, as people forget the quotation marks.
    stdout = self.output_of("explain", "Cluster", "barriers", "are", "not")
    self.assertStartsWith(stdout, "MGPU011")

  def test_explains_as_json(self):
    found = json.loads(self.output_of("explain", "--json", "MGPU011"))
    self.assertEqual(found["query"], "MGPU011")
    expected = catalog.get("MGPU011").to_json()
    self.assertEqual(found["entries"], [{**expected, "score": 1.0}])

  def test_lists_every_code_once(self):
    codes = [entry.code for entry in catalog.entries()]
    lines = self.output_of("explain", "--list").splitlines()
    self.assertEqual([line.split()[0] for line in lines], codes)
    found = json.loads(self.output_of("explain", "--list", "--json"))
    self.assertEqual([entry["code"] for entry in found["entries"]], codes)

  # hooks and doctor

  def test_hooks(self):
    lines = self.output_of("hooks").splitlines()
    self.assertEqual([line.split()[0] for line in lines], list(hooks.SLUGS))
    for line in lines:
      self.assertRegex(line, r"  (applied|not needed)")

  @parameterized.parameters(("strict", 1), ("on", 0))
  def test_refused_hook(self, mode, status):
    # A JAX that is not quite the one we know.
    code = """
      import sys
      import jax_mgpu_ext
      from jax_mgpu_ext._src import cli
      from jax_mgpu_ext._src import releases
      for known in releases.FINGERPRINTS.values():
        known.clear()
      sys.exit(cli.main())
    """
    command = (sys.executable, "-c", textwrap.dedent(code))
    env = {"JAX_MGPU_EXT": mode}
    for args in (["hooks", "--json"], ["doctor", "--json"]):
      stdout = self.output_of(*args, status=status, env=env, command=command)
      found = json.loads(stdout)
      states = {s["slug"]: s for s in found["hooks"]}
      self.assertEqual(states["ref_unions"]["state"], "refused")
      self.assertNotEmpty(states["ref_unions"]["required"])
      self.assertNotEmpty(states["ref_unions"]["found"])
    self.assertIn("ref_unions is refused", " ".join(found["problems"]))

  def test_doctor(self):
    stdout = self.output_of("doctor")
    for text in (
        *("Python", "jax", "jaxlib", "ptxas", "nvdisasm", "nvcc", "GPU"),
        *("JAX_PLATFORMS", "JAX_MGPU_EXT", "JAX_MGPU_EXT_DISABLE"),
        *hooks.SLUGS,
        sys.executable,
    ):
      self.assertIn(text, stdout)
    self.assertEndsWith(stdout, "Problems\n  none\n")

  def test_doctor_as_json(self):
    import jax  # pylint: disable=g-import-not-at-top

    found = json.loads(self.output_of("doctor", "--json"))
    packages = {package["name"]: package for package in found["packages"]}
    self.assertEqual(packages["jax"]["version"], jax.__version__)
    if releases.canonical(jax.__version__) in releases.SUPPORTED:
      self.assertStartsWith(packages["jax"]["note"], "supported")
    self.assertEqual(found["gpu"]["state"], "none")
    self.assertIn("JAX_PLATFORMS=cpu", found["gpu"]["reason"])
    self.assertEqual(found["variables"]["JAX_PLATFORMS"], "cpu")
    self.assertEqual([s["slug"] for s in found["hooks"]], list(hooks.SLUGS))

  def test_doctor_with_a_broken_backend(self):
    env = {"JAX_PLATFORMS": "no_such_platform"}
    found = json.loads(self.output_of("doctor", "--json", env=env))
    self.assertEqual(found["gpu"]["state"], "unknown")
    self.assertIn("no_such_platform", found["gpu"]["reason"])

  # check

  def test_passing_case(self):
    stdout = self.output_of("check", "--stage", "specs", _SHIPPED_CASE)
    self.assertRegex(stdout, r"peer_exchange\[float32\] +passed")
    self.assertEndsWith(stdout, "1 case: 1 passed, 0 failed\n")

  def test_passing_case_as_json(self):
    stdout = self.output_of(
        *("check", "--json", "--stage=specs", "--target=h100", "--jobs=1"),
        *("--timeout-s=60", _SHIPPED_CASE),
    )
    found = json.loads(stdout)
    self.assertTrue(found["ok"])
    self.assertLen(found["cases"], 1)

  def test_failing_case(self):
    stdout = self.output_of("check", "failing.py", status=1)
    self.assertIn("no kernel today", stdout)
    self.assertEndsWith(stdout, "1 case: 0 passed, 1 failed\n")

  def test_failing_case_as_json(self):
    found = json.loads(
        self.output_of("check", "--json", "failing.py", status=1)
    )
    self.assertFalse(found["ok"])
    self.assertIn("no kernel today", json.dumps(found["cases"]))

  # The program itself.

  def test_version(self):
    expected = f"mgpu-ext {jax_mgpu_ext.__version__}\n"
    self.assertEqual(self.output_of("--version"), expected)

  @parameterized.parameters(
      [[]], [["--help"]], [["-h"]], [["check", "--help"]]
  )
  def test_help(self, args):
    stdout = self.output_of(*args)
    self.assertIn("Usage: mgpu-ext", stdout)
    self.assertIn("check", stdout)

  def test_console_script(self):
    script = pathlib.Path(sys.executable).parent / "mgpu-ext"
    if not script.exists():
      self.skipTest("the package is not installed in this environment")
    stdout = self.output_of("explain", "MGPU011", command=(str(script),))
    self.assertStartsWith(stdout, "MGPU011")

  def test_output_that_nobody_reads(self):
    for args in (["explain", "--list"], ["explain", "--list", "--json"], []):
      read, write = os.pipe()
      os.close(read)
      with os.fdopen(write, "w") as stdout:
        done = self.run_command(*args, stdout=stdout, stderr=subprocess.PIPE)
      self.assertEqual(done.returncode, 141)
      self.assertEqual(done.stderr, "")

  def test_output_that_cannot_be_written(self):
    if not os.path.exists("/dev/full"):
      self.skipTest("no /dev/full on this system")
    with open("/dev/full", "w", encoding="utf-8") as stdout:
      done = self.run_command(
          "explain", "--list", stdout=stdout, stderr=subprocess.PIPE
      )
    self.assertEqual(done.returncode, 2)
    self.assertRegex(done.stderr, r"\Amgpu-ext: error: cannot write [^\n]+\n\Z")

  @parameterized.parameters(
      (["chekc"], 2), (["check", "empty.py"], 2), (["explain", "--list"], 0)
  )
  def test_complaint_that_cannot_be_written(self, args, status):
    if not os.path.exists("/dev/full"):
      self.skipTest("no /dev/full on this system")
    with open("/dev/full", "w", encoding="utf-8") as full:
      done = self.run_command(*args, stdout=subprocess.PIPE, stderr=full)
    self.assertEqual(done.returncode, status)
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as pipe:
      done = self.run_command(*args, stdout=subprocess.PIPE, stderr=pipe)
    self.assertEqual(done.returncode, status)

  def test_output_that_is_for_reading(self):
    with open(os.devnull, encoding="utf-8") as stdout:
      done = self.run_command(
          "explain", "--list", stdout=stdout, stderr=subprocess.PIPE
      )
    self.assertEqual(done.returncode, 2)
    self.assertRegex(done.stderr, r"\Amgpu-ext: error: cannot write [^\n]+\n\Z")

  @parameterized.parameters("<&-", "<&- >&-", ">&-", "<&- >&- 2>&-")
  def test_closed_streams(self, closed):
    for args, status in (
        ("check empty.py", 2),
        ("hooks", 0),
        (f"check --stage specs '{_SHIPPED_CASE}'", 0),
    ):
      command = f"{sys.executable} -m jax_mgpu_ext {args} {closed}"
      done = self.run_command(command=("sh", "-c", command))
      self.assertEqual(done.returncode, status, done.stderr)
      self.assertNotIn("Traceback", done.stderr)
      if status and "2>" not in closed:
        self.assertIn("no cases in 'empty.py'", done.stderr)

  def test_folder_that_is_gone(self):
    for args, status, says in (
        ("hooks", 0, "aval_dispatch"),
        (f"check --stage specs '{_SHIPPED_CASE}'", 0, "1 case: 1 passed"),
        ("check ../empty.py", 2, "mgpu-ext: error: "),
        ("check empty.py", 2, "mgpu-ext: error: "),
    ):
      command = (
          "mkdir gone && cd gone && rmdir ../gone &&"
          f" exec {sys.executable} -m jax_mgpu_ext {args}"
      )
      done = self.run_command(command=("sh", "-c", command))
      self.assertEqual(done.returncode, status, done.stderr)
      self.assertIn(says, done.stdout + done.stderr)
      self.assertNotIn("Traceback", done.stderr)

  @parameterized.parameters("3000000", "1e9", "1e300")
  def test_large_limits(self, seconds):
    self.output_of("check", "--stage=specs", "--timeout-s", seconds,
                   _SHIPPED_CASE)
    self.output_of("doctor", "--gpu-timeout-s", seconds)

  def test_signals_are_left_as_they_were(self):
    before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGHUP)]
    with mock.patch.object(sys, "stdout", io.StringIO()):
      self.assertEqual(cli.main(["--version"]), 0)
    after = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGHUP)]
    self.assertEqual(after, before)

  def test_locale_without_the_characters(self):
    env = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONUTF8": "0"}
    done = self.run_command("explain", "zörk", env=env)
    self.assert_one_line(done, 2, ["--list"])
    done.stderr.encode("ascii")
    self.output_of("explain", "MGPU011", env=env).encode("ascii")

  @parameterized.parameters(
      (signal.SIGINT, 130, "interrupted"),
      (signal.SIGTERM, 143, "ended by SIGTERM"),
      (signal.SIGHUP, 129, "ended by SIGHUP"),
  )
  def test_interrupted(self, number, status, says):
    started = pathlib.Path(self.folder, "endless.started")
    started.unlink(missing_ok=True)
    with subprocess.Popen(
        [*_COMMAND, "check", "endless.py"],
        cwd=self.folder,
        env=_environ(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
      _wait_for(started)
      process.send_signal(number)
      stdout, stderr = process.communicate(timeout=60)
    self.assertEqual((stdout, stderr), ("", f"mgpu-ext: {says}\n"))
    self.assertEqual(process.returncode, status)

  def test_patches(self):
    status = self.output_of("patches", "status")
    for release in ("0.10.2", "0.11.2", "0.12.0.1"):
      self.assertRegex(status, rf"{release} +aval_dispatch +yes +yes")
    self.assertIn("overlay", self.output_of("patches", "--help"))
    for args, says in (
        (["check", "--release", "9"], "0.12.0.1"),
        (["bogus"], "rebase"),
        (["overlay", "--out", self.folder], "empty"),
    ):
      done = self.run_command("patches", *args)
      self.assertEqual((done.returncode, done.stdout), (2, ""))
      self.assertEqual(done.stderr.count("\n"), 1)
      self.assertIn(says, done.stderr)

  def test_ignored_hangup(self):
    # As below nohup.
    code = "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN)"
    code += f"; os.execv(sys.executable, {[*_COMMAND, 'check', 'hup.py']})"
    pathlib.Path(self.folder, "hup.py").write_text(
        "import os, signal, time\n"
        "with open('hup.started', 'w') as f: pass\n"
        "time.sleep(3)\n"
    )
    started = pathlib.Path(self.folder, "hup.started")
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=self.folder,
        env=_environ(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
      _wait_for(started)
      process.send_signal(signal.SIGHUP)
      _, stderr = process.communicate(timeout=60)
    self.assertIn("no cases in 'hup.py'", stderr)
    self.assertEqual(process.returncode, 2)


if __name__ == "__main__":
  absltest.main()
