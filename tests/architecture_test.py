"""Who may import whom, as ARCHITECTURE.md says."""

from __future__ import annotations

import ast
import pathlib

from absl.testing import absltest

_PACKAGE = pathlib.Path(__file__).resolve().parents[1] / "jax_mgpu_ext"
_SRC = _PACKAGE / "_src"

# Layer by layer: a module may import those of its own layer and of lower ones.
# `_src/hooks`, `_src/catalog` and `kernels` stand for all that is in them.
LAYERS = (
    {"errors", "launch"},
    {"config", "releases", "targets", "texts"},
    {
        "spec_text", "weak_cache", "aval_table", "avals", "composites",
        "partition", "catalog",
    },
    {"deadlock", "hooks", "specs"},
    {
        "aot", "budget", "budget_errors", "budget_kernel", "budget_limits",
        "budget_mesh", "budget_rows", "child_server", "children", "installed",
        "kernel_calls", "loading", "programs", "refusals",
    },
    {"check_cases", "kernels", "patchset"},
    {
        "budget_objects", "check", "check_interpreter", "check_pool",
        "check_compile", "check_options", "check_reports", "check_sources",
        "check_stages", "check_worker",
    },
    {"doctor", "gpu_probe"},
    {"budget_report", "compile_report", "report", "streams"},
    {
        "budget_commands", "cli", "command_options", "compile_commands",
        "sweep_executors",
    },
)
# What `import jax_mgpu_ext` loads; it must import nothing but these and the
# standard library.
_AT_IMPORT = {"errors", "launch", "config", "releases", "hooks"}


def _layer(name: str) -> int:
  for number, names in enumerate(LAYERS):
    if name in names:
      return number
  raise AssertionError(f"{name} is in no layer of ARCHITECTURE.md")


def _modules():
  for path in sorted(_SRC.rglob("*.py")):
    parts = path.relative_to(_SRC).with_suffix("").parts
    if parts != ("__init__",):
      yield path, parts[0]
  for path in sorted((_PACKAGE / "kernels").rglob("*.py")):
    yield path, "kernels"


def _imports(path: pathlib.Path, top_level_only: bool):
  """Yields the dotted names that a module imports."""
  tree = ast.parse(path.read_text(encoding="utf-8"))
  nodes = tree.body if top_level_only else ast.walk(tree)
  for node in nodes:
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _ours(name: str) -> str | None:
  """Returns which module of ours a dotted name belongs to."""
  parts = name.split(".")
  if parts[:2] == ["jax_mgpu_ext", "_src"] and len(parts) > 2:
    return parts[2]
  if parts[:2] == ["jax_mgpu_ext", "kernels"]:
    return "kernels"
  return None


class ArchitectureTest(absltest.TestCase):

  def test_layers(self):
    for path, name in _modules():
      for imported in filter(None, map(_ours, _imports(path, False))):
        self.assertLessEqual(
            _layer(imported), _layer(name), f"{path.name} imports {imported}"
        )

  def test_nothing_imports_the_command_line(self):
    for path, name in _modules():
      if name != "cli":
        self.assertNotIn("cli", map(_ours, _imports(path, False)), path)

  def test_what_the_import_loads_needs_no_jax(self):
    for path, name in _modules():
      if name in _AT_IMPORT:
        for imported in _imports(path, True):
          self.assertNotIn(
              imported.partition(".")[0], ("jax", "jaxlib", "wrapt", "numpy"),
              f"{path.name} imports {imported} at its top level",
          )

  def test_layers_name_only_what_exists_or_is_planned(self):
    planned = set()
    existing = {name for _, name in _modules()}
    self.assertEqual(set().union(*LAYERS) - existing - planned, set())

  def test_modules_are_short(self):
    for path, _ in _modules():
      lines = path.read_text(encoding="utf-8").count("\n")
      self.assertLess(lines, 400, path.name)

  def test_facades_only_forward(self):
    for path in sorted(_PACKAGE.glob("*.py")):
      if path.name in ("__init__.py", "__main__.py"):
        continue
      tree = ast.parse(path.read_text(encoding="utf-8"))
      for node in tree.body:
        self.assertIsInstance(node, (ast.ImportFrom, ast.Expr), path.name)


if __name__ == "__main__":
  absltest.main()
