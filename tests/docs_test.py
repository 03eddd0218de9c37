"""The documents: what exists is in them, and what is in them runs."""

from __future__ import annotations

import pathlib
import re
import tempfile

from absl.testing import absltest
from absl.testing import parameterized
import jax

from jax_mgpu_ext._src import catalog
from jax_mgpu_ext._src import config
from jax_mgpu_ext._src import hooks
from jax_mgpu_ext._src import releases
from tests import aot_support
from tests import child

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_PAGES = (
    "README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md",
    "docs/hooks.md", "docs/errors.md", "docs/terms.md", "docs/patch-policy.md",
    "docs/compiling.md",
)


def _read(page: str) -> str:
  return (_ROOT / page).read_text(encoding="utf-8")


def _snippets(page: str) -> list[str]:
  return re.findall(r"```python\n(.*?)```", _read(page), re.DOTALL)


class CompleteTest(absltest.TestCase):

  def test_every_hook_is_described(self):
    text = _read("docs/hooks.md")
    for slug in hooks.SLUGS:
      self.assertIn(f"| `{slug}` |", text)

  def test_every_code_is_in_the_line_of_its_hook(self):
    lines = _read("docs/hooks.md").splitlines()
    for slug in hooks.SLUGS:
      [line] = [l for l in lines if l.startswith(f"| `{slug}` |")]
      for first, last in re.findall(r"MGPU(\d+) to MGPU(\d+)", line):
        numbers = range(int(first), int(last) + 1)
        line += " ".join(f"MGPU{n:03}" for n in numbers)
      self.assertEqual(
          set(re.findall(r"(?:MGPU|DL)\d+", line)), set(hooks.load(slug).codes), slug
      )

  def test_every_code_is_described(self):
    text = _read("docs/errors.md")
    for entry in catalog.entries():
      self.assertIn(entry.code, text)

  def test_every_command_is_in_the_readme(self):
    out = child.check_output("""
        from typer.main import get_command
        from jax_mgpu_ext._src import cli
        print(*get_command(cli.app).commands)
    """)
    text = _read("README.md")
    self.assertGreaterEqual(len(out.split()), 4)
    for command in out.split():
      self.assertIn(f"`mgpu-ext {command}", text)

  def test_every_variable_and_release(self):
    text = _read("README.md")
    for name in (
        config.MODE_VARIABLE, config.DISABLE_VARIABLE, config.CACHE_DIR_VARIABLE
    ):
      self.assertIn(f"`{name}`", text)
    for release in releases.SUPPORTED:
      self.assertIn(release, text)
    self.assertEqual(set(releases.PYTHONS), set(releases.SUPPORTED))

  def test_every_state(self):
    text = _read("docs/hooks.md")
    for state in hooks.STATES:
      self.assertIn(f"`{state}`", text)
      self.assertIn(f"`{state}`", hooks.HookStatus.__doc__)

  def test_links(self):
    for page in _PAGES:
      folder = (_ROOT / page).parent
      for link in re.findall(r"\]\(([^)#]+)\)", _read(page)):
        if not link.startswith("http"):
          self.assertTrue((folder / link).exists(), f"{page}: {link}")


class RunTest(parameterized.TestCase):

  @parameterized.parameters(
      (page, number)
      for page in ("README.md", "docs/hooks.md", "docs/compiling.md")
      for number in range(len(_snippets(page)))
  )
  def test_snippet(self, page, number):
    code = _snippets(page)[number]
    if "import aot" in code and aot_support.why_not():
      self.skipTest(aot_support.why_not())
    if "deadlock.run" in code and jax.__version__.startswith("0.10"):
      self.skipTest("it would hang for ever on JAX 0.10.2, as README says")
    if 'collective_axes="x"' not in code:
      child.check_output(code)
      return
    # The example of a mistake: JAX alone, then with the plugin.
    alone = child.run(code)
    self.assertEqual(alone.returncode, 1)
    helped = child.run(f"import jax_mgpu_ext\n{code}")
    last = helped.stderr.strip().splitlines()[-1]
    self.assertIn(last.rpartition("errors.")[2], _read("README.md"))
    self.assertIn("MGPU023", last)
    child.check_output(
        "import jax_mgpu_ext\n" + code.replace('axes="x"', 'axes=("x",)')
    )

  def test_the_case_of_the_readme_passes(self):
    [case] = [s for s in _snippets("README.md") if "kernel_case" in s]
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    path = pathlib.Path(folder.name) / "my_kernels.py"
    path.write_text(case, encoding="utf-8")
    out = child.check_output(
        """
        import sys
        from jax_mgpu_ext._src import cli
        sys.argv[0] = "mgpu-ext"
        sys.exit(cli.main())
        """,
        "check", str(path),
    )
    self.assertIn("increment", out)


if __name__ == "__main__":
  absltest.main()
