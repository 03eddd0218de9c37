"""Tests of kernel cases, and of the command that checks them."""

from __future__ import annotations

import contextlib
import fractions
import functools
import io
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np
import rich.console

from jax_mgpu_ext import check
from jax_mgpu_ext._src import check_cases
from jax_mgpu_ext._src import check_options
from jax_mgpu_ext._src import check_pool
from jax_mgpu_ext._src import check_sources
from jax_mgpu_ext._src import check_stages
from jax_mgpu_ext._src import report
from tests import child

# Nothing can interrupt it: it never lets go of Python's lock.
_HOG = (
    "import re; open(__file__ + '.started', 'w').close();"
    " re.match(r'(a+)+$', 'a' * 64 + 'b')"
)

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_CASES = str(_ROOT / "tests" / "data" / "kernel_cases.py")

# A case that needs no Pallas, so that it is cheap.
_LIGHT = """
from jax_mgpu_ext.check import kernel_case
import numpy as np

@kernel_case(inputs=lambda rng: [rng.random(4, np.float32)],
             reference=lambda x: x + x)
def double(interpret=None):
  return lambda x: x + x
"""

# The interpreter of JAX 0.10.2 cannot be told to give up.
HAS_REPORTS = not jax.__version__.startswith("0.10")

# Case: states of the stages, and what the failed one says.
_OUTCOMES = {
    "good": ("passed", "passed", ""),
    "good_again": ("passed", "passed", ""),
    "wrong_value": (
        "passed", "failed",
        r"wrong value: output: 4096 of 4096 values differ from the reference\n"
        r"first at \(0, 0\): got -?\d\.0, expected -?\d\.0",
    ),
    "race": (
        "passed", "failed",
        r"race: read at .*kernel_cases\.py:\d+:\d+ \(read_too_early\) and write"
        r" at .*kernel_cases\.py:\d+:\d+ \(read_too_early\)\n",
    ),
    "race_ignored": ("passed", "passed", ""),
    "hang": (
        "passed", "failed",
        r"hang: missing arrival: .*warpgroup 0 waits for `.*` at .*kernel_cases\.py"
        r":\d+ \(wait_for_nobody\), which got 0 of 1 arrivals .*\[DL002\]\n"
        r".*: blocked, waits for"
        if HAS_REPORTS else
        r"not done within the time limit of 3 s \[DL009\]\n.*0 waits at .*kernel_cases\.py"
        r":\d+:\d+ \(wait_for_nobody\): 0 of 1 arrivals$",
    ),
    "deadlock": (
        "passed", "failed",
        r"hang: wait cycle: warpgroup 0 and warpgroup 1 wait for .*_first\).*"
        r"\[DL001\]\n.*: blocked.*\n.*: blocked"
        if HAS_REPORTS else
        r"not done within the time limit of 3 s \[DL009\]\n"
        r".*0 waits at .*_first\): 0 of 1 arrivals\n"
        r".*1 waits at .*_second\): 0 of 1 arrivals$",
    ),
    "unsupported": ("passed", "skipped", ""),
    "own_not_implemented": (
        "failed", "skipped",
        r"NotImplementedError: this is not supported by me\n.*kernel_cases\.py",
    ),
    "grid[1]": ("passed", "passed", ""),
    "grid[2]": ("passed", "passed", ""),
    "exit": ("failed", "skipped", r"SystemExit: 0\n.*in exit_at_once"),
    "crash": (
        "passed", "failed",
        r"the process ended with exit status 3\nit printed:\nlast words$",
    ),
    "killed": (
        "failed", "skipped",
        r"the process was ended by SIGABRT\n(.|\n)*in killed",
    ),
    "threads_and_forks": ("passed", "passed", ""),
    "daemon": ("passed", "passed", ""),
    "daemon_of_a_crash": (
        "failed", "skipped", r"the process ended with exit status 4\n",
    ),
    "no_text": (
        "failed", "skipped",
        r"NoText: \(its own text cannot be had: ZeroDivisionError\)\n.*in no_text",
    ),
    "no_text_inside": (
        "failed", "skipped", r"NoText: \(its own text cannot be had: Zero",
    ),
    "long_text": (
        "failed", "skipped",
        r"ValueError: (\\n|x)* \[\.\.\. 4\d{6} characters \.\.\.\] x*\n.*in long",
    ),
    "log_that_does_not_fit": ("passed", "passed", ""),
    "closed_connection": (
        "failed", "skipped", r"the process closed its connection",
    ),
    "closed_streams": ("passed", "passed", ""),
    "bad_spec": (
        "failed", "skipped", r"SpecTypeError: .*specs\[0\].*MGPU002",
    ),
    "no_kernel": (
        "failed", "skipped",
        r"the factory must return a callable, it returned None",
    ),
    "bad_inputs": ("failed", "skipped", r"ZeroDivisionError: division by zero"),
    "one_array_as_inputs": (
        "failed", "skipped",
        r"inputs must return a tuple of the kernel's arguments, got ndarray",
    ),
    "bad_reference": (
        "passed", "failed", r"AttributeError: .*no_such_attribute",
    ),
    "other_shape": (
        "passed", "failed",
        r"output: shape \(64, 64\), the reference has \(1, 64\)",
    ),
    "for_b200": ("passed", "passed", ""),
}


def _running_with(mark: str) -> list[int]:
  """Returns the processes that inherited an environment variable's value."""
  found = []
  for folder in pathlib.Path("/proc").iterdir():
    with contextlib.suppress(OSError):
      # A process that was killed may be a zombie for a moment, without memory.
      if folder.name.isdigit() and (
          mark.encode() in (folder / "environ").read_bytes()
      ):
        found.append(int(folder.name))
  return found


class OutcomesTest(parameterized.TestCase):
  """One run over all the cases of the data file."""

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.mark = f"jax-mgpu-ext-test-{os.getpid()}-{time.time_ns()}"
    os.environ["CHECK_TEST_MARK"] = cls.mark
    cls.addClassCleanup(os.environ.pop, "CHECK_TEST_MARK")
    cls.progress = []
    cls.stdout = io.StringIO()
    with contextlib.redirect_stdout(cls.stdout):
      cls.results = check.run(
          [_CASES],
          stages=["specs", "interpret"],
          on_progress=lambda *counts: cls.progress.append(counts),
      )
    cls.left_over = _running_with(cls.mark)
    cls.by_name = {result.name: result for result in cls.results}

  @parameterized.named_parameters((name, name) for name in _OUTCOMES)
  def test_outcome(self, name):
    specs, interpret, says = _OUTCOMES[name]
    result = self.by_name[name]
    self.assertEqual([s.stage for s in result.stages], ["specs", "interpret"])
    self.assertEqual(
        [s.state for s in result.stages], [specs, interpret], result
    )
    self.assertEqual(result.ok, not says)
    for stage in result.stages:
      if stage.state == "failed":
        self.assertRegex(f"{stage.message}\n{stage.details}".strip(), says)
        self.assertNotIn("\n", stage.message)
        self.assertNotIn("noise while importing", stage.details)

  def test_all_cases_are_there_in_order(self):
    self.assertCountEqual(self.by_name, _OUTCOMES)
    self.assertEqual(self.results[0].name, "good")
    self.assertEqual(self.results[-1].name, "for_b200")
    self.assertEqual(self.results[0].selector, f"{_CASES}::good")

  def test_skip_says_why(self):
    _, interpret = self.by_name["unsupported"].stages
    self.assertEqual(
        interpret.message,
        f"the GPU interpreter of JAX {jax.__version__} cannot run it: predicate"
        " not supported",
    )
    _, interpret = self.by_name["bad_spec"].stages
    self.assertEqual(interpret.message, "specs did not pass")

  def test_progress(self):
    total = len(_OUTCOMES)
    self.assertEqual(self.progress, [(i, total) for i in range(total + 1)])

  def test_what_cases_print_stays_away(self):
    self.assertEqual(self.stdout.getvalue(), "")

  def test_nothing_is_left_over(self):
    self.assertEqual([pid for pid in self.left_over if pid != os.getpid()], [])

  def test_report(self):
    out = io.StringIO()
    report.print_check(
        self.results, console=rich.console.Console(file=out, width=10000)
    )
    text = out.getvalue()
    self.assertRegex(text, r"\nwrong_value +passed \d\.\d s +failed \d\.\d s")
    self.assertRegex(text, r"interpret skipped for 1 case: .*not supported\n")
    self.assertIn(f"{_CASES}::crash failed interpret:\n", text)
    self.assertIn("\n  last words\n", text)
    self.assertEndsWith(
        text, "\n30 cases: 11 passed, 19 failed; interpret skipped for 1\n"
    )
    self.assertLess(len(text), 40_000)

  def test_json(self):
    data = json.loads(json.dumps(report.check_json(self.results)))
    self.assertEqual((data["ok"], data["passed"]), (False, 11))
    self.assertLen(data["cases"], data["passed"] + data["failed"])
    self.assertEqual(
        {case["name"]: case["ok"] for case in data["cases"]},
        {name: not says for name, (*_, says) in _OUTCOMES.items()},
    )


class SelectorTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
    self.enter_context(contextlib.chdir(self.folder))

  def write(self, name: str, text: str) -> str:
    path = self.folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return name

  @parameterized.named_parameters(
      ("missing_file", "no.py", None, r"there is no file 'no\.py'$"),
      ("missing_in_folder", "a/no.py::x", None, r"there is no file 'a/no\.py'$"),
      ("folder", "./", None, r"'\./' is a folder"),
      ("no_python_file", "x.txt", "", r"'x\.txt' is no Python file"),
      ("missing_module", "no_such.module", None,
       r"there is no module 'no_such\.module'$"),
      ("no_module_name", "some thing", None, r"neither a file nor the name"),
      ("empty", "", None, r"'' is no selector"),
      ("empty_case", "x.py::", "", r"'x\.py::' is no selector"),
      ("syntax", "x.py", "x = (", r"cannot import 'x\.py': SyntaxError: .*line 1"),
      # A ValueError up to Python 3.11.3, a SyntaxError since then.
      ("null_byte", "x.py", "\0",
       r"cannot import 'x\.py': (SyntaxError|ValueError): .*null bytes"),
      ("name_error", "x.py", "\nfoo",
       r"cannot import 'x\.py': NameError: name 'foo' is not defined"
       r" \(.*x\.py, line 2\)$"),
      ("import_error", "x.py", "import no_such_module",
       r"cannot import 'x\.py': ModuleNotFoundError: .*'no_such_module'"),
      ("exits", "x.py", "import sys\nsys.exit(0)",
       r"cannot import 'x\.py': SystemExit: 0 \(.*line 2\)$"),
      ("interrupts", "x.py", "raise KeyboardInterrupt",
       r"cannot import 'x\.py': KeyboardInterrupt \(.*line 1\)$"),
      ("crashes", "x.py", "import os\nprint('why')\nos._exit(5)",
       r"cannot import 'x\.py': the process ended with exit status 5 \(why\)$"),
      ("no_cases", "x.py", "", r"there are no cases in 'x\.py': declare"),
      ("unknown_case", "x.py::duble", _LIGHT,
       r"there is no case 'duble' in 'x\.py', but 'double'$"),
      ("unknown_param", "x.py::double[1]", _LIGHT, r"no case 'double\[1\]'"),
      ("two_cases_of_one_name", "x.py", _LIGHT + _LIGHT,
       r"'x\.py' declares two cases 'double', in lines 5 and 13: give"),
      ("bad_declaration", "x.py",
       _LIGHT.replace("inputs=", "targets='h1', inputs="),
       r"cannot import 'x\.py': TargetError: unknown target 'h1'"),
      ("checks_itself", "x.py",
       "from jax_mgpu_ext import check\n" + _LIGHT + "check.run([__file__])",
       r"cannot import 'x\.py': UsageError: a module that is being checked"),
      ("bad_package", "broken_package", None, r"cannot import 'broken_package':"
       r" RuntimeError: not today \(.*inner\.py, line 1\)$"),
  )
  def test_usage_error(self, selector, text, says):
    if text is not None:
      self.write(selector.partition("::")[0], text)
    self.write("broken_package/__init__.py", "")
    self.write("broken_package/inner.py", "raise RuntimeError('not today')")
    with self.assertRaisesRegex(check.UsageError, says) as caught:
      check.run([selector])
    self.assertNotIn("\n", str(caught.exception))

  @parameterized.named_parameters(
      ("stage", dict(stages=["specs", "gpus"]),
       "unknown stage 'gpus', expected one of specs, budget, interpret,"
       " compile"),
      ("target", dict(targets=["a100"]),
       "unknown target 'a100', expected one of h100, h100_pcie, .*, or"
       " file.toml::name for one of your own"),
      ("jobs", dict(jobs=0), "at least 1 job, got 0"),
      ("limit", dict(timeout_s=0.0), "a time limit above 0 s, got 0.0"),
      ("nan", dict(timeout_s=float("nan")), "a time limit above 0 s, got nan"),
      ("word", dict(timeout_s="3"), "a time limit above 0 s, got '3'"),
      ("no_float", dict(timeout_s=10**400), "a time limit above 0 s, got 10000"),
      ("half_a_job", dict(jobs=1.5), "at least 1 job, got 1.5"),
      ("job_is_true", dict(jobs=True), "at least 1 job, got True"),
  )
  def test_bad_argument(self, arguments, says):
    with self.assertRaisesRegex(check.UsageError, says):
      check.run([_CASES], **arguments)

  @parameterized.named_parameters(
      ("numpy", dict(jobs=np.int64(1), timeout_s=np.float32(60))),
      ("more_than_poll_takes", dict(timeout_s=3_000_000)),
      ("more_than_c_has", dict(timeout_s=10**30)),
  )
  def test_good_argument(self, arguments):
    self.write("x.py", _LIGHT)
    [result] = check.run(["x.py"], stages=["interpret"], **arguments)
    self.assertTrue(result.ok, result)

  def test_huge_limit_of_a_case(self):
    self.write("x.py", _LIGHT.replace("inputs=", "timeout_s=10**9, inputs="))
    [result] = check.run(["x.py"], stages=["interpret"])
    self.assertTrue(result.ok, result)

  @parameterized.named_parameters(
      ("no_text", "class E(Exception):\n  def __str__(self): 1 / 0\nraise E",
       r"cannot import 'x\.py': E: \(its own text cannot be had: ZeroD.* line 3"),
      ("long", "raise ValueError('x' * 5_000_000 + 'end')",
       r"cannot import 'x\.py': ValueError: x+ \[\.\.\. \d+ characters \.\.\.\]"
       r" x+end \(.*, line 1\)$"),
  )
  def test_text_of_an_import_error(self, text, says):
    self.write("x.py", text)
    with self.assertRaisesRegex(check.UsageError, says) as caught:
      check.run(["x.py"])
    self.assertLess(len(str(caught.exception)), 3000)

  def test_folder_that_is_gone(self):
    path = self.write("x.py", _LIGHT)
    (self.folder / "gone").mkdir()
    with contextlib.chdir(self.folder / "gone"):
      (self.folder / "gone").rmdir()
      with self.assertRaisesRegex(check.UsageError, "current folder is gone"):
        # Where `..` leads to depends on the system, but not what is said.
        with absltest.mock.patch.object(os.path, "isfile", lambda path: True):
          check.run(["../x.py"])
      os.chdir(os.sep)  # To have one to come back from.
    absolute = str(self.folder / path)
    [result] = check.run([absolute], stages=["interpret"])
    self.assertTrue(result.ok, result)

  def test_module_from_a_folder_that_is_gone(self):
    (self.folder / "gone").mkdir()
    output = child.check_output("""
        import os
        from jax_mgpu_ext import check
        os.chdir("gone")
        os.rmdir("../gone")
        results = check.run(
            ["jax_mgpu_ext.kernels.peer_exchange"], stages=["specs"])
        print(all(result.ok for result in results))
    """)
    self.assertEqual(output, "True\n")

  def test_worker_killed_by_somebody_else(self):
    # The first one, while it runs a case; the second, between two cases.
    self.write("x.py", _LIGHT + """
import os, pathlib, time
@kernel_case(inputs=lambda rng: (), reference=lambda: 0)
def waits(interpret=None):
  if os.fork() == 0:  # It keeps the pipes to the parent open.
    time.sleep(600)
  pathlib.Path("number").write_text(str(os.getpid()))
  time.sleep(600)

@kernel_case(inputs=lambda rng: [rng.random(4, np.float32)],
             reference=lambda x: x)
def same(interpret=None):
  return lambda x: x
""")
    number = self.folder / "number"

    def kill():
      while not (number.exists() and number.read_text()):
        time.sleep(0.05)
      os.kill(int(number.read_text()), signal.SIGKILL)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    started = time.monotonic()
    results = check.run(["x.py"], jobs=1, timeout_s=300, stages=["interpret"])
    self.assertLess(time.monotonic() - started, 100)
    killer.join(10)
    states = {r.name: r.stages[0].state for r in results}
    self.assertEqual(
        states, {"double": "passed", "waits": "failed", "same": "passed"}
    )
    self.assertEqual(
        results[1].stages[0].message, "the process was ended by SIGKILL"
    )

  def test_idle_worker_killed_by_somebody_else(self):
    self.write("x.py", _LIGHT)
    self.enter_context(contextlib.chdir(self.folder))
    source, _ = check_sources.parse("x.py")
    with check_pool.Pool(1) as pool:
      [task] = pool.load(source)
      [worker] = pool._idle
      worker._process.kill()
      worker._process.wait()
      self.assertTrue(pool.check(task, ["interpret"], 60.0).ok)

  @parameterized.named_parameters(("stdin", [0]), ("all", [0, 1, 2]))
  def test_closed_streams(self, closed):
    # Not only below the command, which mends its own.
    self.write("x.py", _LIGHT)
    output = child.check_output(f"""
        import os, sys
        from jax_mgpu_ext import check
        out = os.dup(1)
        for fd in {closed}:
          os.close(fd)
        [result] = check.run(["x.py"], timeout_s=60)
        os.write(out, str(result.ok).encode())
        sys.stdout = sys.stderr = None
    """)
    self.assertEqual(output, "True")

  def test_slow_import(self):
    self.write("x.py", "import time\ntime.sleep(600)")
    self.enter_context(
        absltest.mock.patch.object(check_pool, "_LOAD_TIMEOUT_S", 1.5)
    )
    with self.assertRaisesRegex(check.UsageError, "it takes more than 1.5 s$"):
      check.run(["x.py"])

  def test_hostile_names(self):
    names = [
        "with space.py", "dash-ed.py", "quo'te\".py", "$(touch x).py", "ünï.py",
        "-option.py", "a::b.py", "random.py", "jax.py", "ma\nny.py",
    ]
    for name in names:
      self.write(name, _LIGHT)
    selectors = [*names, "a::b.py::double"]
    results = check.run(selectors, stages=["interpret"])
    self.assertEqual(
        [result.selector for result in results], [f"{n}::double" for n in names]
    )
    self.assertTrue(all(result.ok for result in results), results)
    self.assertEqual(
        {stage.state for result in results for stage in result.stages},
        {"passed"},
    )

  def test_modules_packages_and_relative_imports(self):
    self.write("package/__init__.py", "")
    self.write("package/__main__.py", "raise SystemExit('not to be run')")
    self.write("package/factor.py", "FACTOR = 2")
    self.write("package/inner/__init__.py", "")
    relative = "from ..factor import FACTOR\n" + _LIGHT.replace(
        "lambda x: x + x\n", "lambda x: x * FACTOR\n"
    )
    self.write("package/inner/cases.py", relative)
    self.write("package/more.py", _LIGHT)
    self.write("sibling.py", "FACTOR = 2")
    self.write("alone.py", relative.replace("..factor", "sibling"))
    results = check.run(
        ["package", "package.more::double", "package/inner/cases.py", "alone.py"]
    )
    self.assertEqual(
        [result.selector for result in results],
        [
            "package.inner.cases::double",
            "package.more::double",
            "package.more::double",
            "package/inner/cases.py::double",
            "alone.py::double",
        ],
    )
    self.assertTrue(all(result.ok for result in results), results)

  def test_one_source_under_two_names_is_checked_once(self):
    self.write("x.py", _LIGHT)
    results = check.run(
        ["x.py", "./x.py::double", str(self.folder / "x.py")], jobs=1
    )
    self.assertEqual([result.selector for result in results], ["x.py::double"])

  def test_stages_targets_and_limit(self):
    results = check.run(
        [f"{_CASES}::good", f"{_CASES}::for_b200", f"{_CASES}::hang"],
        stages=["interpret"],
        targets=["h100", "h200"],
        timeout_s=2.0,
    )
    states = {r.name: [(s.stage, s.state) for s in r.stages] for r in results}
    self.assertEqual(
        states,
        {
            "good": [("interpret", "passed")],
            "hang": [("interpret", "failed")],
            "for_b200": [("interpret", "skipped")],
        },
    )
    messages = {r.name: r.stages[0].message for r in results}
    self.assertEqual(messages["for_b200"], "the case is for b200")
    self.assertStartsWith(
        messages["hang"],
        "hang: missing arrival" if HAS_REPORTS
        else "not done within the time limit of 2 s [DL009]",
    )

  def test_reports_and_timelines(self):
    if not HAS_REPORTS:
      self.skipTest("the interpreter of JAX 0.10.2 tells of nothing")
    results = check.run(
        [f"{_CASES}::{name}" for name in ("hang", "race", "wrong_value")],
        stages=["interpret"],
        options=check_options.Options(
            out=os.path.abspath("reports"), trace=os.path.abspath("t.json")
        ),
    )
    stages = {r.name: r.stages[0] for r in results}
    self.assertEqual(
        {name: stage.data["failure"] for name, stage in stages.items()},
        dict(hang="hang", race="race", wrong_value="wrong value"),
    )
    self.assertEqual(stages["hang"].data["report"]["code"], "DL002")
    self.assertCountEqual(
        os.listdir("reports"), ["hang.hang.txt", "hang.hang.json", "race.race.txt"]
    )
    text = pathlib.Path("reports/hang.hang.txt").read_text(encoding="utf-8")
    self.assertIn("Last events of each thread:", text)
    self.assertIn("hang.hang.txt", stages["hang"].details)
    for name in ("hang", "race", "wrong_value"):
      found = json.loads(pathlib.Path(f"t-{name}.json").read_text("utf-8"))
      self.assertNotEmpty(found["traceEvents"])

  def test_names_the_code_of_what_jax_says(self):
    self.write("x.py", """
        from jax_mgpu_ext import specs
        from jax_mgpu_ext.check import kernel_case
        import jax, numpy as np, jax.numpy as jnp
        from jax.experimental.pallas import mosaic_gpu as plgpu

        @kernel_case(inputs=lambda rng: [np.zeros(8, np.float32)],
                     reference=lambda x: np.zeros((32, 64), np.float32))
        def part(interpret=None):
          return plgpu.kernel(
              lambda x, o, *, tile: o.__setitem__(..., tile[:32]),
              out_type=jax.ShapeDtypeStruct((32, 64), jnp.float32),
              scratch_types=dict(tile=specs.TiledSMEM((64, 64), "float32")),
              interpret=interpret,
              compiler_params=plgpu.CompilerParams(
                  lowering_semantics=plgpu.LoweringSemantics.Warpgroup))
    """)
    [result] = check.run(["x.py"], stages=["specs"])
    self.assertRegex(
        result.stages[0].message, r"Failed to infer a possible.*\[MGPU127\]$"
    )

  @parameterized.parameters(
      dict(trace="no/such/folder/t.json"), dict(trace="."), dict(out="file")
  )
  def test_files_that_cannot_be_written(self, **arguments):
    pathlib.Path("file").write_text("")
    with self.assertRaisesRegex(check.UsageError, "expected a (file|folder)"):
      check.run([f"{_CASES}::good"], options=check_options.Options(**arguments))

  def test_parent_imports_no_jax(self):
    self.write("x.py", _LIGHT)
    output = child.check_output("""
        import sys
        from jax_mgpu_ext import check
        from jax_mgpu_ext._src import report
        [result] = check.run(["x.py"])
        print(result.ok, report.check_json([result])["ok"])
        print([m for m in ("jax", "numpy", "rich") if m in sys.modules])
    """)
    self.assertEqual(output, "True True\n[]\n")


class InterruptTest(parameterized.TestCase):

  @parameterized.product(
      ending=[
          (signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129),
          (signal.SIGKILL, -9),
      ],
      what=["hangs", "hogs", "hogs_the_import"],
  )
  def test_children_end_with_the_parent(self, ending, what):
    number, status = ending
    selector = f"{_CASES}::hang"
    if what != "hangs":
      folder = self.enter_context(tempfile.TemporaryDirectory())
      path = pathlib.Path(folder, "x.py")
      path.write_text(
          _HOG
          if "import" in what
          else _LIGHT.replace("  return", f"  {_HOG}\n  return"),
          encoding="utf-8",
      )
      selector = str(path)
    mark = f"jax-mgpu-ext-test-{os.getpid()}-{time.time_ns()}"
    process = subprocess.Popen(
        [sys.executable, "-m", "jax_mgpu_ext", "check", selector,
         "--timeout-s", "600"],
        env={**os.environ, "CHECK_TEST_MARK": mark},
        cwd=_ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    self.addCleanup(process.kill)
    # The command, the guard, and the worker.
    self.wait_until(lambda: len(_running_with(mark)) > 2)
    if what == "hangs":
      time.sleep(1.0)  # Somewhere between importing and hanging.
    else:
      self.wait_until(lambda: os.path.exists(f"{selector}.started"))
    process.send_signal(number)
    _, stderr = process.communicate(timeout=30)
    self.assertEqual(process.returncode, status, stderr)
    self.assertNotIn("Traceback", stderr)
    if number in (signal.SIGTERM, signal.SIGHUP):
      self.assertEqual(stderr, f"mgpu-ext: ended by {number.name}\n")
    self.wait_until(lambda: not _running_with(mark))

  def wait_until(self, condition):
    deadline = time.monotonic() + 30
    while not condition():
      self.assertLess(time.monotonic(), deadline)
      time.sleep(0.05)


class DeclarationTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.enter_context(
        absltest.mock.patch.object(check_cases, "declared", [])
    )

  def declare(self, factory=lambda interpret: None, **arguments):
    functions = dict(inputs=lambda rng: (), reference=lambda: ())
    check.kernel_case(**{"name": "x", **functions, **arguments})(factory)
    return check_cases.declared

  @parameterized.named_parameters(
      ("inputs", dict(inputs=3), TypeError, "inputs=3"),
      ("reference", dict(reference=None), TypeError, "reference=None"),
      ("factory", dict(factory=3), TypeError, "a kernel factory, got 3"),
      ("target", dict(targets=("h1",)), ValueError, "h100, h100_pcie, h200"),
      ("no_target", dict(targets=()), ValueError, "h100, h100_pcie, h200"),
      ("empty_name", dict(name=""), ValueError, "name"),
      ("colons", dict(name="a::b"), ValueError, "without '::'"),
      ("newline", dict(name="a\nb"), ValueError, "printable"),
      ("escape", dict(params={"\x1b[0m": {}}), ValueError, "printable"),
      ("rtol", dict(rtol=-1), ValueError, "rtol=-1"),
      ("atol", dict(atol=float("nan")), ValueError, "atol=nan"),
      ("limit", dict(timeout_s=0), ValueError, "timeout_s=0"),
      ("limit_is_a_word", dict(timeout_s="3"), ValueError, "timeout_s='3'"),
      ("limit_is_true", dict(timeout_s=True), ValueError, "timeout_s=True"),
      ("limit_is_none", dict(timeout_s=None), ValueError, "timeout_s=None"),
      ("limit_is_complex", dict(timeout_s=3j), ValueError, "timeout_s=3j"),
      ("limit_is_infinite", dict(timeout_s=np.inf), ValueError, "=inf"),
      ("limit_is_no_float", dict(timeout_s=10**400), ValueError, "timeout_s=1"),
      ("rtol_is_an_array", dict(rtol=np.ones(2)), ValueError, "rtol=array"),
      ("rtol_is_numpys_true", dict(rtol=np.True_), ValueError, "rtol=.*True"),
      ("targets_are_none", dict(targets=None), ValueError, "of h100"),
      ("name_is_a_number", dict(name=3), ValueError, "printable name.* got 3"),
      ("param_is_a_number", dict(params={"a": 3}), ValueError, "a mapping"),
      ("params", dict(params=[{}]), ValueError, "a mapping"),
      ("no_params", dict(params={}), ValueError, "a mapping"),
  )
  def test_bad(self, arguments, error, says):
    with self.assertRaisesRegex(error, says):
      self.declare(**arguments)
    self.assertEmpty(check_cases.declared)

  def test_number_without_a_text(self):
    # Python writes no int of more than 4300 digits.
    with self.assertRaisesRegex(ValueError, "timeout_s=a value of type int"):
      self.declare(timeout_s=10**5000)

  def test_good(self):
    [case] = self.declare(targets="h200", rtol=1, timeout_s=0.5)
    self.assertEqual((case.name, case.base_name), ("x", "x"))
    self.assertEqual((case.targets, case.rtol), (("h200",), 1))
    self.assertIn(__name__, case.modules)

  @parameterized.parameters(
      (3,), (0.5,), (np.float32(0.5),), (np.int64(3),), (np.float16(0.5),),
      (np.array(0.5),), (jnp.bfloat16(0.5),), (jnp.finfo(jnp.bfloat16).eps,),
      (10**9,), (fractions.Fraction(1, 2),),
  )
  def test_good_numbers(self, value):
    [case] = self.declare(rtol=value, atol=value, timeout_s=value)
    for got in (case.rtol, case.atol, case.timeout_s):
      self.assertIs(type(got), float)
      self.assertEqual(got, float(value))

  def test_name_of_the_factory(self):
    def ring(interpret):
      return interpret

    self.assertEqual(self.declare(ring, name=None)[0].name, "ring")
    with self.assertRaisesRegex(TypeError, "pass name="):
      self.declare(functools.partial(ring), name=None)

  def test_params_reach_those_who_take_them(self):
    calls = []
    one, two = self.declare(
        lambda *, interpret, n, m=1: calls.append(("factory", n, m)),
        inputs=lambda rng, m=0: calls.append(("inputs", m)) or (),
        reference=lambda *args, **params: calls.append(("ref", params)),
        specs=lambda n: ("specs", n),
        params={"a": dict(n=1), "b": dict(n=2, m=3)},
    )
    self.assertEqual([one.name, two.name], ["x[a]", "x[b]"])
    for case in (one, two):
      case.make_kernel()
      case.make_inputs(None)
      case.make_reference()
    self.assertEqual(
        calls,
        [
            ("factory", 1, 1), ("inputs", 0), ("ref", dict(n=1)),
            ("factory", 2, 3), ("inputs", 3), ("ref", dict(n=2, m=3)),
        ],
    )
    self.assertEqual(two.make_specs(), ("specs", 2))


class CompareTest(parameterized.TestCase):

  @parameterized.named_parameters(
      ("equal", [1.0, 2.0], [1.0, 2.0], {}),
      ("nan", [np.nan], [np.nan], {}),
      ("infinite", [np.inf, -np.inf], [np.inf, -np.inf], {}),
      ("rtol", [100.0], [101.0], dict(rtol=0.01)),
      ("atol", [0.0], [0.5], dict(atol=0.5)),
      ("wide_reference", np.float32([0.1]), np.float64([0.1]), {}),
      ("bfloat16", np.float32([0.1]).astype(jnp.bfloat16), [0.1], {}),
      ("other_int", np.int32([3]), np.int64([3]), {}),
      ("bool", [True], [True], {}),
      ("complex", [1j], [1j], {}),
      ("empty", np.zeros((0, 3)), np.zeros((0, 3)), {}),
      ("scalar", 1.0, 1.0, {}),
      ("tuple_and_list", ([1.0], [2.0]), [[1.0], [2.0]], {}),
  )
  def test_equal(self, got, want, tolerances):
    check_stages.compare(
        _arrays(got), _arrays(want), **{"rtol": 0, "atol": 0, **tolerances}
    )

  @parameterized.named_parameters(
      ("value", [1.0, 2.0], [1.0, 3.0], {}, r"output: 1 of 2 values"),
      ("nan", [np.nan, 1.0], [1.0, 1.0], {}, "output: 1 of 2"),
      ("not_nan", [1.0], [np.nan], dict(atol=9.0), "output: 1 of 1"),
      ("infinite", [np.inf], [-np.inf], dict(rtol=1.0), "output: 1 of 1"),
      ("rtol", [100.0], [102.0], dict(rtol=0.01), "output: 1 of 1"),
      ("kind", np.int32([1]), np.float32([1]), {},
       "output: type int32, the reference has float32"),
      ("shape", [1.0], [[1.0]], {}, r"shape \(1,\), the reference has \(1, 1\)"),
      ("broadcast", [1.0, 1.0], [1.0], {}, r"shape \(2,\)"),
      ("large_int", np.int64([2**60]), np.int64([2**60 + 1]), {}, "1 of 1"),
      ("second", ([1.0], [1.0]), ([1.0], [2.0]), {}, r"output\[1\]: 1 of 1"),
      ("count", ([1.0], [1.0]), ([1.0],), {},
       "returned 2 arrays, the reference 1"),
      ("bool", [True], [False], {}, "1 of 1"),
      ("complex", [1j], [1.0 + 0j], {}, "1 of 1"),
  )
  def test_different(self, got, want, tolerances, says):
    with self.assertRaisesRegex(check_cases.StageFailed, says):
      check_stages.compare(
          _arrays(got), _arrays(want), **{"rtol": 0, "atol": 0, **tolerances}
      )

  def test_says_where(self):
    got, want = np.zeros((4, 4), np.float32), np.zeros((4, 4), np.float32)
    want[1, 2], want[3, 1] = 1, np.nan
    with self.assertRaises(check_cases.StageFailed) as caught:
      check_stages.compare(got, want, rtol=0, atol=0)
    self.assertEqual(
        caught.exception.details,
        "first at (1, 2): got 0.0, expected 1.0\n"
        "worst at (3, 1): got 0.0, expected nan\n"
        "rtol=0, atol=0",
    )


def _arrays(tree):
  if isinstance(tree, tuple) or (
      isinstance(tree, list) and len(tree) > 1 and isinstance(tree[0], list)
  ):
    return type(tree)(np.asarray(leaf) for leaf in tree)
  return np.asarray(tree)


class ReportTest(absltest.TestCase):

  def result(self, name, *stages, selector="x.py"):
    return check.CaseResult(
        name=name,
        selector=f"{selector}::{name}",
        targets=("h100",),
        stages=tuple(
            check.StageResult(stage=s, state=state, message=message)
            for s, state, message in stages
        ),
    )

  def text(self, *results):
    out = io.StringIO()
    report.print_check(
        results,
        console=rich.console.Console(
            file=out, width=200, force_terminal=True, color_system=None
        ),
    )
    return out.getvalue()

  def test_all_passed(self):
    text = self.text(self.result("a[b]", ("specs", "passed", "")))
    self.assertRegex(text, r"case +specs *\na\[b\] +passed *\n")
    self.assertEndsWith(text, "\n1 case: 1 passed, 0 failed\n")

  def test_control_characters_and_markup_are_shown_not_obeyed(self):
    text = self.text(
        self.result("[red]x", ("specs", "failed", "\x1b[2J [bold]\r\x07 ok"))
    )
    self.assertIn("[red]x", text)
    self.assertIn(r"\x1b[2J [bold]\r\x07 ok", text)
    self.assertNotIn("\x1b[2J", text)

  def test_long_texts_are_shortened(self):
    message = "start" + "x" * 5_000_000 + "end"
    text = self.text(self.result("a", ("specs", "failed", message)))
    self.assertLess(len(text), 3000)
    self.assertRegex(text.replace("\n", ""), r"startx.*characters.*xend")

  def test_selectors_where_names_are_not_enough(self):
    passed = ("specs", "passed", "")
    text = self.text(
        self.result("ring", passed, selector="a.py"),
        self.result("ring", passed, selector="b.py"),
    )
    self.assertIn("a.py::ring", text)
    self.assertIn("b.py::ring", text)

  def test_one_line_for_each_reason_to_skip(self):
    skipped = ("interpret", "skipped", "no clusters")
    text = self.text(*(self.result(name, skipped) for name in "abc"))
    self.assertEndsWith(text, "\n3 cases: 0 passed, 0 failed, 3 skipped\n")
    self.assertIn("interpret skipped for 3 cases: no clusters\n", text)
    self.assertEqual(text.count("no clusters"), 1)


class ParseTest(absltest.TestCase):

  def test_source_is_the_same_by_any_way(self):
    one, case = check_sources.parse(f"{_CASES}::good")
    other, none = check_sources.parse(os.path.relpath(_CASES))
    self.assertEqual((one, case, none), (other, "good", None))

  def test_module(self):
    source, case = check_sources.parse("a.b::c::d")
    self.assertEqual((source.kind, source.target), ("module", "a.b"))
    self.assertEqual(case, "c::d")


if __name__ == "__main__":
  absltest.main()
