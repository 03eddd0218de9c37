"""`mgpu-ext budget` and `mgpu-ext targets`, seen from outside."""

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

from absl.testing import absltest
from absl.testing import parameterized
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
import rich.console

from jax_mgpu_ext import budget as budget_lib
from jax_mgpu_ext import targets
from jax_mgpu_ext._src import budget_report

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_COMMAND = (sys.executable, "-m", "jax_mgpu_ext")

_FILES = {
    "my.py": """
        import functools
        import jax
        from jax.experimental.pallas import mosaic_gpu as plgpu
        import jax.numpy as jnp
        import numpy as np
        from jax_mgpu_ext.check import kernel_case

        print("printed while it is imported")

        def ring(num_stages=4):
          print("printed while it is called")
          return dict(
              tiles=plgpu.SMEM((num_stages, 128, 128), jnp.float16),
              full=plgpu.Barrier(num_barriers=num_stages),
          )

        big = functools.partial(ring, 12)
        tree = [plgpu.SMEM((100,), jnp.float32), None]
        semaphore = plgpu.SemaphoreType.REGULAR
        blackwell = plgpu.TMEM((128, 64), jnp.float32)
        no_spec = {"x": [3]}
        hostile = {"\\x1b[2J": plgpu.SMEM((100,), jnp.float32)}

        class holder:
          specs = ring(2)

        def needs(num_stages, *, rows, unused=1):
          pass

        def fails():
          raise ValueError("\\x1b[31mno tree today")

        def leaves():
          raise SystemExit(3)

        @kernel_case(inputs=lambda rng: (np.zeros(128, np.float32),),
                     reference=lambda x: x,
                     params={"a": dict(num_stages=2), "b": dict(num_stages=3)})
        def case(interpret=None, num_stages=4):
          def body(x, o, ring):
            o[...] = x[...]
          return plgpu.kernel(
              body, out_type=jax.ShapeDtypeStruct((128,), jnp.float32),
              scratch_types=[ring(num_stages)], interpret=interpret)

        @kernel_case(inputs=lambda rng: (), reference=lambda: 0)
        def silent_case(interpret=None):
          return lambda: jnp.zeros(3)
    """,
    "broken.py": "import no_such_module_of_anybody",
    "leaving.py": "raise SystemExit(0)",
    "waiting.py": """
        import pathlib
        import time
        pathlib.Path(__file__).with_suffix(".started").touch()
        time.sleep(1000)
    """,
    "gpus.toml": """
        [targets.h20]
        based_on = "h100"
        sm_count = 78
        smem_bytes_per_block = 50000
    """,
    "bad.toml": "[targets.h20]",
}

# What is asked -> pieces of the one line that answers it.
_BAD = {
    "nothing": (["budget"], ["MODULE:OBJECT"]),
    "no_object": (["budget", "my.py"], ["my.py", "file.py:object"]),
    "no_file": (["budget", "missing.py:x"], ["missing.py"]),
    "no_module": (["budget", "no_such:x"], ["no module 'no_such'"]),
    "no_attribute": (["budget", "my.py:rings"], ["'rings'", "my.py"]),
    "import_error": (["budget", "broken.py:x"], ["no_such_module_of_anybody"]),
    "import_leaves": (["budget", "leaving.py:x"], ["SystemExit"]),
    "needs": (["budget", "my.py:needs"], ["num_stages, rows"]),
    "fails": (["budget", "my.py:fails"], [r"\x1b[31mno tree today"]),
    "leaves": (["budget", "my.py:leaves"], ["SystemExit"]),
    "no_spec": (["budget", "my.py:no_spec"], ["specs['x'][0]", "MGPU001"]),
    "no_case": (["budget", "my.py::cases"], ["'cases'", "case[a]"]),
    "two_cases": (["budget", "my.py::case"], ["case[a], case[b]"]),
    "silent_case": (
        ["budget", "my.py::silent_case"], ["calls no plgpu.kernel"],
    ),
    "cluster_of_a_case": (
        ["budget", "my.py::case[a]", "--cluster", "2"], ["has its own"],
    ),
    "target": (["budget", "my.py:tree", "--target", "h1"], ["'h1'", "h100"]),
    "target_file": (["budget", "my.py:tree", "--target", "bad.toml::h20"],
                    ["bad.toml", "missing"]),
    "cluster": (["budget", "my.py:tree", "--cluster", "2,x"], ["'2,x'", "2,1"]),
    "cluster_of_none": (["budget", "my.py:tree", "--cluster", "0"], ["'0'"]),
    "cluster_of_four": (["budget", "my.py:tree", "--cluster", "1,1,1,1"],
                        ["one to three"]),
    "threads": (["budget", "my.py:tree", "--num-threads", "0"], ["from 1"]),
    "targets": (["targets", "h100"], ["h100"]),
}


class CommandTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    folder = tempfile.TemporaryDirectory()
    cls.addClassCleanup(folder.cleanup)
    cls.folder = pathlib.Path(folder.name)
    for name, text in _FILES.items():
      (cls.folder / name).write_text(textwrap.dedent(text), encoding="utf-8")

  def environ(self):
    clean = {
        k: v for k, v in os.environ.items() if not k.startswith("JAX_MGPU")
    }
    paths = [str(_ROOT), *filter(None, [clean.get("PYTHONPATH")])]
    return {
        **clean, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(paths)
    }

  def run_command(self, *args):
    return subprocess.run(
        [*_COMMAND, *args], cwd=self.folder, env=self.environ(),
        capture_output=True, text=True, timeout=120, check=False,
    )

  @parameterized.named_parameters(
      (name, *case) for name, case in _BAD.items()
  )
  def test_bad(self, args, pieces):
    result = self.run_command(*args)
    self.assertEqual(result.returncode, 2, result.stderr)
    self.assertEqual(result.stdout, "")
    *noise, line = result.stderr.splitlines()
    self.assertStartsWith(line, "mgpu-ext: error: ")
    for text in noise:
      self.assertStartsWith(text, "printed while it is")
    self.assertTrue(line.isprintable(), line)
    for piece in pieces:
      self.assertIn(piece, line)

  @parameterized.parameters(
      ("my.py:ring", "131104 of 232448", "specs['tiles']"),
      ("my.py:tree", "1024 of 232448", "specs[0]"),
      ("my.py:semaphore", "0 of 232448", "semaphore"),
      ("my.py:holder.specs", "65552 of 232448", "specs['full']"),
      ("my:ring", "131104 of 232448", "fits"),
      ("my.py::case[a]", "65552 of 232448", "fits"),
      ("my.py:hostile", "1024 of 232448", r"\x1b[2J"),
      ("jax_mgpu_ext.kernels.cluster_ring:specs", "114736 of", "fits"),
  )
  def test_fits(self, selector, *pieces):
    result = self.run_command("budget", selector)
    self.assertEqual(result.returncode, 0, result.stderr)
    for piece in ("blocks per SM", "fits\n", *pieces):
      self.assertIn(piece, result.stdout)
    self.assertNotIn("printed", result.stdout)
    self.assertNotIn("\x1b", result.stdout)

  def test_over(self):
    result = self.run_command("budget", "my.py:big", "--num-threads", "3")
    self.assertEqual(result.returncode, 1, result.stderr)
    self.assertIn("393312 of 232448", result.stdout)
    self.assertIn("num_stages=7 fits, with 229432 bytes", result.stdout)
    self.assertIn("[MGPU101]", result.stdout)
    self.assertIn("384 a block", result.stdout)
    self.assertNotIn("fits\n", result.stdout)

  def test_targets_and_mesh(self):
    both = ("budget", "my.py:blackwell", "--target", "b200", "--target", "h100")
    result = self.run_command(*both, "--cluster", "4,4")
    self.assertEqual(result.returncode, 1, result.stderr)
    self.assertIn("64 of 512 columns", result.stdout)
    self.assertIn("[MGPU106]", result.stdout)
    self.assertIn("16 blocks a cluster", result.stdout)
    result = self.run_command(*both[:4])
    self.assertEqual(result.returncode, 0, result.stderr)
    result = self.run_command("budget", "my.py:ring", "--target", "gpus.toml")
    self.assertEqual(result.returncode, 1, result.stderr)
    self.assertIn("num_stages=1 fits", result.stdout)

  def test_json(self):
    for name, fits in (("ring", True), ("big", False)):
      result = self.run_command("budget", f"my.py:{name}", "--json")
      self.assertEqual(result.returncode, 0 if fits else 1, result.stderr)
      document = json.loads(result.stdout)
      self.assertEqual(document["fits"], fits)
      [found] = document["budgets"]
      self.assertEqual(found["fits"], fits)
      self.assertEqual(
          found["smem_bytes"],
          sum(r["smem_bytes"] + r["padding_bytes"] for r in found["rows"]),
      )
      self.assertEqual(
          [e["code"] for e in found["over"]], [] if fits else ["MGPU101"]
      )

  def test_list_of_targets(self):
    result = self.run_command("targets")
    self.assertEqual(result.returncode, 0, result.stderr)
    lines = result.stdout.splitlines()
    self.assertLen(lines, 1 + len(targets.names()))
    for name, line in zip(targets.names(), lines[1:]):
      target = targets.get(name)
      self.assertStartsWith(line, name)
      self.assertIn(target.description, line)
      self.assertIn(str(target.smem_bytes_per_block), line)
    result = self.run_command("targets", "--json")
    self.assertEqual(result.returncode, 0, result.stderr)
    self.assertEqual(
        json.loads(result.stdout),
        [targets.get(name).to_json() for name in targets.names()],
    )

  @parameterized.parameters((signal.SIGINT, 130), (signal.SIGTERM, 143))
  def test_signals_end_an_import(self, number, status):
    started = self.folder / "waiting.started"
    started.unlink(missing_ok=True)
    with subprocess.Popen(
        [*_COMMAND, "budget", "waiting.py:x"], cwd=self.folder,
        env=self.environ(), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    ) as process:
      deadline = time.monotonic() + 60
      while not started.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
      process.send_signal(number)
      _, errors = process.communicate(timeout=60)
    self.assertEqual(process.returncode, status, errors)
    self.assertLen(errors.splitlines(), 1)


class ReportTest(parameterized.TestCase):

  def bar(self, specs, target="h100"):
    return budget_report.bar(budget_lib.budget(specs, target))

  def test_bar(self):
    quarter = plgpu.SMEM((232448 // 4,), jnp.int8)
    self.assertEqual(self.bar(None), "." * 64)
    self.assertEqual(self.bar(quarter), "a" * 16 + "." * 48)
    self.assertEqual(
        self.bar([quarter, quarter]), "a" * 16 + "b" * 16 + "." * 32
    )
    self.assertEqual(
        self.bar([quarter] * 4 + [quarter]),
        # Each is rounded up to 1024 bytes, so that a part of a cell is left.
        "a" * 16 + "b" * 16 + "c" * 16 + "d" * 16 + "!" + "e" * 16 + ".",
    )

  def test_bar_shows_padding_and_what_is_small(self):
    # A cell of this target is 1584 bytes.
    bar = self.bar(plgpu.SMEM((5 * 1024 + 1,), jnp.int8), "rtx_pro_6000")
    self.assertEqual(bar, "aaa-" + "." * 60)
    big = plgpu.SMEM((200, 1024), jnp.int8)
    bar = self.bar([big, plgpu.Barrier(num_barriers=1)])
    self.assertEqual(bar.count("b"), 1)
    self.assertLess(bar.index("a"), bar.index("b"))

  def test_bar_of_what_is_far_over_ends(self):
    self.assertLen(self.bar(plgpu.SMEM((2**30,), jnp.int8)), 129)

  def test_more_items_than_letters(self):
    specs = [plgpu.SMEM((8, 1024), jnp.int8) for _ in range(28)]
    self.assertLen(self.bar(specs), 64)

  def test_names_are_no_markup(self):
    stream = io.StringIO()
    console = rich.console.Console(file=stream, width=10_000)
    found = budget_lib.budget({"[red]x[/red]": plgpu.SMEM((8,), jnp.int8)})
    budget_report.print_budget(found, console=console)
    self.assertIn("specs['[red]x[/red]']", stream.getvalue())


if __name__ == "__main__":
  absltest.main()
