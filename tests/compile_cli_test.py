"""`mgpu-ext compile`, `mgpu-ext sweep`, and the stages that compile."""

from __future__ import annotations

import concurrent.futures
import contextlib
import csv
import io
import json
import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
import textwrap

from absl.testing import absltest
from absl.testing import parameterized

from jax_mgpu_ext import aot
from jax_mgpu_ext import check
from jax_mgpu_ext._src import cli
from jax_mgpu_ext._src import compile_report
from jax_mgpu_ext._src.aot import sweep as sweep_lib
from tests import aot_support
from tests import child

_CASES = """
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax_mgpu_ext.check import kernel_case

F32 = jnp.float32
OUT = "out_type" if jax.__version__ != "0.10.2" else "out_shape"
X = jax.ShapeDtypeStruct((128,), F32)

def case(**arguments):
  return kernel_case(
      inputs=lambda rng: (np.zeros(128, np.float32),), reference=lambda x: x,
      **arguments)

@case(targets=("h100", "b200"), params={"1": dict(scale=1), "2": dict(scale=1)})
def copy(*, scale, interpret=None):
  def body(x, o):
    o[...] = x[...] * scale
  return plgpu.kernel(body, **{OUT: X}, interpret=interpret)

@case(targets=("h100", "rtx_pro_6000"))
def large(interpret=None):
  def body(x, o):
    def scope(tiles):
      tiles[0, :] = x[...]
      o[...] = tiles[0, :]
    pl.run_scoped(scope, plgpu.SMEM((400, 128), F32))
  return plgpu.kernel(body, **{OUT: X}, interpret=interpret)

@case()
def refused(interpret=None):
  def body(x, o):
    o[...] = x[...]
    if interpret is None:
      @plgpu.inline_mgpu(arg_types=())
      def assembly(ctx):
        from jax._src.lib.mlir import ir
        from jax._src.lib.mlir.dialects import llvm
        void = ir.Type.parse("!llvm.void")
        llvm.inline_asm(void, [], "no.such;", "", has_side_effects=True)
      assembly()
  return plgpu.kernel(body, **{OUT: X}, interpret=interpret)

@case()
def plain(interpret=None):
  return lambda x: x + 0

def configs():
  def body(x, o):
    def scope(tiles):
      tiles[0, :] = x[...]
      o[...] = tiles[0, :]
    pl.run_scoped(scope, plgpu.SMEM((rows, 128), F32))
  found = {}
  for rows in (1, 100, 1000):
    def make(rows=rows):
      def body(x, o):
        def scope(tiles):
          tiles[0, :] = x[...]
          o[...] = tiles[0, :]
        pl.run_scoped(scope, plgpu.SMEM((rows, 128), F32))
      return plgpu.kernel(body, **{OUT: X}), (X,)
    found[f"rows={rows}"] = make
  found["fails"] = lambda: 1 / 0
  found["no_kernel"] = (lambda x: x + 1, (X,))
  found["no_pair"] = 7
  return found

sequence = list(configs().values())[:1]
empty = {}
number = 7
"""


class _CliTestCase(aot_support.CompilingTestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    self.enter_context(contextlib.chdir(self.folder))
    (self.folder / "cases.py").write_text(
        textwrap.dedent(_CASES), encoding="utf-8"
    )

  def run_cli(self, *args):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
      with absltest.mock.patch.object(cli.streams, "mend"):
        with absltest.mock.patch.object(
            cli.streams, "nothing_else_on_stdout", contextlib.nullcontext
        ):
          status = cli.main(list(args))
    return status, out.getvalue(), err.getvalue()

  def assert_usage_error(self, says, *args):
    status, out, err = self.run_cli(*args)
    self.assertEqual((status, out), (2, ""), err)
    self.assertRegex(err, f"^mgpu-ext: error: .*{says}")
    self.assertLen(err.strip().splitlines(), 1)


@aot_support.needs_compiler
class CompileTest(_CliTestCase):

  def test_table_and_files(self):
    status, out, err = self.run_cli(
        "compile", "cases.py::copy", "--emit", "ptx,sass,mlir,resources,xla",
        "--out", "made",
    )
    self.assertEqual((status, err), (0, ""))
    self.assertRegex(out, r"h100\ncase +registers +spills .*\ncopy\[1\] +\d+ ")
    self.assertRegex(out, r"b200\ncase +registers ")
    files = sorted(p.name for p in pathlib.Path("made").iterdir())
    self.assertEqual(files, sorted(
        f"copy-{n}.{target}.{kind}"
        for n in (1, 2) for target in ("h100", "b200")
        for kind in ("ptx", "sass", "mlir", "resources.json", "xla.txt")
    ))
    ptx = pathlib.Path("made/copy-1.b200.ptx").read_text(encoding="utf-8")
    self.assertIn(".target sm_100a", ptx)
    sass = pathlib.Path("made/copy-1.h100.sass").read_text(encoding="utf-8")
    self.assertIn("sm_90a", sass)
    numbers = json.loads(pathlib.Path("made/copy-1.h100.resources.json")
                         .read_text(encoding="utf-8"))
    self.assertEqual(numbers["target"], "h100")
    self.assertGreater(numbers["registers"], 0)
    self.assertIn(f"wrote {len(files)} files to", out)

  def test_again_from_the_cache(self):
    for word in (r"\d+\.\d s", "cached"):
      status, out, _ = self.run_cli("compile", "cases.py::copy[1]")
      self.assertEqual(status, 0)
      self.assertRegex(out, rf"copy\[1\] .* {word}\n")
    status, out, _ = self.run_cli("compile", "cases.py::copy[1]", "--no-cache")
    self.assertNotIn("cached", out)

  def test_other_targets_than_declared(self):
    status, out, _ = self.run_cli(
        "compile", "cases.py::copy[1]", "--target", "b300", "--json"
    )
    self.assertEqual(status, 0)
    document = json.loads(out)
    [case] = document["cases"]
    self.assertEqual(list(case["targets"]), ["b300"])
    self.assertTrue(document["ok"])

  def test_failures(self):
    status, out, _ = self.run_cli("compile", "cases.py")
    self.assertEqual(status, 1)
    # What could be compiled is there all the same.
    self.assertRegex(out, r"\nlarge +\d+ ")
    self.assertRegex(
        out, r"cases\.py::large failed:\n  rtx_pro_6000: .*SMEM.*MGPU101"
    )
    self.assertRegex(
        out, r"cases\.py::refused failed:\n  h100: .*\[MGPU114\]\n(.*\n)*.*error"
    )
    self.assertRegex(out, r"cases\.py::plain skipped: it calls no Mosaic GPU")

  @parameterized.named_parameters(
      ("emit", r"expected some of ptx,.* got 'cubin'",
       "--emit", "cubin", "--out", "made"),
      ("no_out", "--emit and --out go together", "--emit", "ptx"),
      ("no_emit", "--emit and --out go together", "--out", "made"),
      ("target", "unknown target 'h101'", "--target", "h101"),
      ("target_file", "cannot read targets from 'no.toml'",
       "--target", "no.toml::x"),
      ("out_is_a_file", "cannot write to .*cases.py", "--emit", "ptx", "--out",
       "cases.py"),
      ("jobs", "whole number from 1 on, got '0'", "--jobs", "0"),
      ("case", "no case 'nope'", "cases.py::nope"),
  )
  def test_bad_input(self, says, *args):
    selectors = [] if args[0].startswith("cases") else ["cases.py::copy"]
    self.assert_usage_error(says, "compile", *selectors, *args)
    self.assertFalse(os.path.exists("made"))

  def test_files_of_two_cases_would_be_one(self):
    text = pathlib.Path("cases.py").read_text(encoding="utf-8")
    text = text.replace('"2": dict', '"1 ": dict')
    pathlib.Path("cases.py").write_text(text, encoding="utf-8")
    self.assert_usage_error(
        "would be written to the same files",
        "compile", "cases.py::copy", "--emit", "ptx", "--out", "made",
    )

  def test_a_file_is_written_whole_or_not(self):
    os.mkdir("made")
    pathlib.Path("made/copy-1.h100.ptx").mkdir()  # Cannot be replaced.
    status, out, _ = self.run_cli(
        "compile", "cases.py::copy[1]", "--target", "h100", "--emit", "ptx",
        "--out", "made",
    )
    self.assertEqual(status, 1)
    self.assertIn("copy-1.h100.ptx", out)
    self.assertEqual(os.listdir("made"), ["copy-1.h100.ptx"])


class StagesTest(_CliTestCase):

  @aot_support.needs_compiler
  def test_budget_and_compile(self):
    results = {
        r.name: {s.stage: s for s in r.stages}
        for r in check.run(["cases.py"], stages=["budget", "compile"])
    }
    states = {
        name: tuple(stage.state for stage in stages.values())
        for name, stages in results.items()
    }
    self.assertEqual(states, {
        "copy[1]": ("passed", "passed"),
        "copy[2]": ("passed", "passed"),
        "large": ("failed", "skipped"),
        "refused": ("passed", "failed"),
        "plain": ("skipped", "skipped"),
    })
    data = results["copy[1]"]["compile"].data
    self.assertEqual(list(data), ["h100", "b200"])
    self.assertGreater(data["b200"]["registers"], 0)
    large = results["large"]["budget"]
    self.assertRegex(large.message, r"^rtx_pro_6000: expected at most 101376")
    self.assertEqual(large.data["rtx_pro_6000"]["code"], "MGPU101")
    self.assertIn("kernels", large.data["h100"])

  def test_mistakes_of_a_factory(self):
    pathlib.Path("slips.py").write_text(textwrap.dedent("""
        import jax
        import jax.numpy as jnp
        import numpy as np
        from jax.experimental.pallas import mosaic_gpu as plgpu
        from jax_mgpu_ext.check import kernel_case

        X = jax.ShapeDtypeStruct((128,), jnp.float32)

        def case(**arguments):
          return kernel_case(
              inputs=lambda rng: (np.zeros(128, np.float32),),
              reference=lambda x: x, **arguments)

        def build(interpret, scratch=()):
          def body(x, o, *refs):
            o[...] = x[...]
          return plgpu.kernel(
              body, out_type=X, scratch_types=scratch, interpret=interpret)

        @case()
        def too_much(interpret=None):
          return build(interpret, [plgpu.SMEM((8, 128, 128), jnp.float16),
                                   plgpu.Barrier(num_barriers=8)])

        @case()
        def always(interpret=None):
          return build(True)

        @case()
        def never(interpret=None):
          return build(None)

        @case()
        def no_argument():
          return build(None)
    """), encoding="utf-8")
    says = {
        "too_much": ("specs", r"^SpecError: expected at most 232448 bytes.*MGPU101"),
        "always": ("specs", "called with interpret=None, and built a kernel for"),
        "never": ("interpret", "does not pass its interpret= on to plgpu.kernel"),
        "no_argument": ("specs", "the factory must take interpret=None"),
    }
    for result in check.run(["slips.py"], stages=["specs", "interpret"]):
      stage, words = says.pop(result.name)
      [failed] = [s for s in result.stages if s.state == "failed"]
      self.assertEqual(failed.stage, stage, result)
      self.assertRegex(failed.message, words)
    self.assertEmpty(says)

  @aot_support.needs_compiler
  def test_only_some_targets(self):
    [result] = check.run(
        ["cases.py::large"], stages=["budget", "compile"], targets=["h100"]
    )
    self.assertTrue(result.ok)
    self.assertEqual(list(result.stages[1].data), ["h100"])

  def test_without_the_extra(self):
    output = child.check_output("""
        import sys
        from jax_mgpu_ext import check
        [result] = check.run(["cases.py::copy[1]"], stages=["compile"])
        print(result.stages[0].state, result.stages[0].message)
    """, env={"PYTHONPATH": self._without_flatbuffers()})
    self.assertRegex(
        output, r"skipped .*flatbuffers.*pip install 'jax-mgpu-ext\[aot\]'"
    )

  def _without_flatbuffers(self):
    path = self.folder / "site"
    path.mkdir()
    (path / "sitecustomize.py").write_text(
        "import sys\nsys.modules['flatbuffers'] = None\n", encoding="utf-8"
    )
    root = pathlib.Path(cli.__file__).parents[2]
    return f"{path}{os.pathsep}{root}"


@aot_support.needs_compiler
class SweepTest(_CliTestCase):

  def test_table(self):
    status, out, err = self.run_cli(
        "sweep", "cases.py:configs", "--target", "h100", "--target",
        "rtx_pro_6000", "--out", "table.csv",
    )
    self.assertEqual((status, err), (0, ""))
    with open("table.csv", encoding="utf-8", newline="") as file:
      rows = list(csv.DictReader(file))
    self.assertLen(rows, 12)
    states = [row["state"] for row in rows]
    self.assertEqual(states, sorted(states, key=sweep_lib.STATES.index))
    found = {(row["config"], row["target"]): row for row in rows}
    self.assertEqual(found["rows=1", "h100"]["state"], "fits")
    self.assertEqual(found["rows=1", "h100"]["smem_bytes"], "1024")
    self.assertGreater(int(found["rows=1", "h100"]["registers"]), 0)
    self.assertEqual(found["rows=1000", "h100"]["code"], "MGPU101")
    self.assertRegex(found["fails", "h100"]["message"], "ZeroDivisionError")
    self.assertEqual(found["no_kernel", "h100"]["code"], "MGPU115")
    self.assertRegex(found["no_pair", "h100"]["message"], "expected a pair")
    self.assertRegex(out, r"\n12 configurations: 4 fits, 2 over, 6 refused\n$")
    self.assertEqual(found["rows=1", "h100"]["num_cta_barrier"],
                     found["rows=100", "h100"]["num_cta_barrier"])

  def test_parquet_and_json(self):
    import pyarrow.parquet  # pylint: disable=g-import-not-at-top

    status, out, _ = self.run_cli(
        "sweep", "cases.py:sequence", "--out", "table.parquet", "--json"
    )
    self.assertEqual(status, 0)
    [row] = json.loads(out)["rows"]
    [record] = pyarrow.parquet.read_table("table.parquet").to_pylist()
    self.assertEqual((row["config"], row["state"]), ("0", "fits"))
    self.assertEqual(record["registers"], row["registers"])
    self.assertFalse(list(self.folder.glob("*.part")))

  def test_nothing_fits(self):
    path = pathlib.Path("bad.py")
    path.write_text("configs = {'a': lambda: 1 / 0}", encoding="utf-8")
    status, out, _ = self.run_cli("sweep", "bad.py:configs")
    self.assertEqual(status, 1)
    self.assertIn("1 configuration: 1 refused", out)

  def test_processes(self):
    status, out, _ = self.run_cli(
        "sweep", "cases.py:configs", "--executor", "processes", "--jobs", "2"
    )
    self.assertEqual(status, 0)
    self.assertRegex(out, r"\n6 configurations: 2 fits, 1 over, 3 refused\n$")

  def test_any_executor(self):
    source = f"{self.folder / 'cases.py'}:configs"
    with concurrent.futures.ProcessPoolExecutor(
        1, multiprocessing.get_context("spawn")
    ) as pool:
      rows = aot.sweep(source, executor=pool)
    self.assertEqual(
        [row.config for row in rows if row.state == "fits"],
        ["rows=1", "rows=100"],
    )
    # Threads may be given what cannot be sent anywhere.
    named = sweep_lib.loading.load_object(source)()
    progress = []
    rows = aot.sweep(
        {"a": named["rows=1"], "b": named["rows=100"]}, targets=["b200"],
        on_progress=lambda *counts: progress.append(counts), sass=False,
    )
    self.assertEqual([r.state for r in rows], ["fits", "fits"])
    self.assertEqual(progress, [(0, 2), (1, 2), (2, 2)])

  def test_dask(self):
    try:
      import distributed  # pylint: disable=g-import-not-at-top
    except ImportError:
      self.skipTest("Dask is not installed")
    with distributed.LocalCluster(
        n_workers=1, threads_per_worker=1, dashboard_address=None
    ) as cluster:
      status, out, err = self.run_cli(
          "sweep", f"{self.folder / 'cases.py'}:configs", "--executor", "dask",
          "--dask", cluster.scheduler_address,
      )
    self.assertEqual(status, 0, err)
    self.assertRegex(out, r"\n6 configurations: 2 fits, 1 over, 3 refused\n$")

  @parameterized.named_parameters(
      ("no_object", r"expected module:object", "cases.py"),
      ("no_file", "there is no file 'no.py'", "no.py:configs"),
      ("no_module", "there is no module 'no_such'", "no_such:configs"),
      ("no_name", "there is no 'nope' in '.*cases.py'", "cases.py:nope"),
      ("empty", "at least one configuration", "cases.py:empty"),
      ("number", "expected a mapping", "cases.py:number"),
      ("target", "unknown target 'h1'", "cases.py:configs", "--target", "h1"),
      ("executor", "expected --executor to be one of", "cases.py:configs",
       "--executor", "magic"),
      ("dask", "--dask is for", "cases.py:configs", "--dask", "tcp://x:1"),
      ("no_dask", "cannot reach the Dask scheduler", "cases.py:configs",
       "--executor", "dask", "--dask", "tcp://127.0.0.1:1"),
      ("out", r"end in \.csv or \.parquet", "cases.py:configs", "--out", "t.txt"),
      ("out_folder", "cannot write 'no/t.csv'", "cases.py:configs", "--out",
       "no/t.csv"),
  )
  def test_bad_input(self, says, *args):
    self.assert_usage_error(says, "sweep", *args)

  def test_edited_file_and_other_folder(self):
    for text in ("a", "b"):
      pathlib.Path("edited.py").write_text(
          f"configs = {{{text!r}: lambda: 1 / 0}}", encoding="utf-8"
      )
      os.utime("edited.py", ns=(ord(text), ord(text)))
      [row] = aot.sweep("edited.py:configs")
      self.assertEqual(row.config, text)

  def test_odd_configurations(self):
    class Bad(Exception):
      def __str__(self):
        raise ValueError
    def leaves():
      raise SystemExit(0)
    def bad():
      raise Bad
    rows = aot.sweep({"leaves": leaves, "bad": bad, 3: (print, 4)})
    self.assertEqual({row.state for row in rows}, {"refused"})
    self.assertLen(aot.sweep(make for make in (leaves, bad)), 2)
    with self.assertRaisesRegex(TypeError, "two configurations are called '1'"):
      aot.sweep({1: leaves, "1": bad})

  @parameterized.named_parameters(
      ("leaves", "raise SystemExit(0)"), ("fails", "raise ValueError('why')"),
      ("empty_error", "assert False"), ("type_error", "len(3)"),
  )
  def test_configurations_that_cannot_be_made(self, code):
    pathlib.Path("bad.py").write_text(
        f"def configs():\n  {code}\n", encoding="utf-8"
    )
    self.assert_usage_error("bad.py:configs' failed: .*line 2", "sweep",
                            "bad.py:configs")

  def test_out_is_no_file(self):
    os.mkdir("t.csv")
    self.assert_usage_error("is no file", "sweep", "cases.py:configs", "--out",
                            "t.csv")

  def test_parquet_without_pyarrow(self):
    with absltest.mock.patch.dict(sys.modules, {"pyarrow.parquet": None}):
      with self.assertRaisesRegex(
          compile_report.UsageError, "pip install pyarrow"
      ):
        compile_report.check_table_path("t.parquet")
    compile_report.check_table_path("t.parquet")

  def test_interrupt(self):
    pathlib.Path("slow.py").write_text(
        "import time\ndef wait():\n  print('here', flush=True)\n"
        "  time.sleep(30)\nconfigs = {'a': wait, 'b': wait, 'c': wait}\n",
        encoding="utf-8",
    )
    root = pathlib.Path(cli.__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-m", "jax_mgpu_ext", "sweep", "slow.py:configs",
         "--jobs", "1", "--out", "t.csv", "--executor", "processes"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(root)},
        start_new_session=True,
    )
    line = process.stderr.readline()  # Standard output is for the table.
    self.assertEqual(line, "here\n")
    os.killpg(process.pid, signal.SIGINT)
    try:
      _, complaints = process.communicate(timeout=25)
    finally:
      with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    self.assertEqual(process.returncode, 130)
    self.assertIn("mgpu-ext: interrupted", complaints)
    self.assertFalse(os.path.exists("t.csv"))


if __name__ == "__main__":
  absltest.main()
