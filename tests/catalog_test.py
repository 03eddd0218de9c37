"""Tests of the error catalog, its search, its document and its examples."""

from __future__ import annotations

import ast
import builtins
from concurrent import futures
import functools
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import textwrap

from absl.testing import absltest
from absl.testing import parameterized

from jax_mgpu_ext._src import catalog
from jax_mgpu_ext._src import errors
from jax_mgpu_ext._src import hooks
from jax_mgpu_ext._src import releases
from tests import aot_support

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "jax_mgpu_ext"
CODE = re.compile(r"(?:MGPU|DL)\d{3}")

# Fields of a file that `load` takes; the tables below spoil one at a time.
GOOD = dict(
    title="A title",
    kind="ours",
    exception="SpecError",
    hook="array_avals",
    since="0.11.2",
    says=["some words {}"],
    meaning="What it means.",
    when="Now.",
    situations=["So."],
    fixes=["Not so."],
    before="1 / 0",
    after="1 / 1",
    related=[],
)


class FakeFile:
  """A catalog file that is not on disk."""

  def __init__(self, name, fields):
    self.name = name
    self._text = fields
    if isinstance(fields, dict):
      # JSON's strings, lists and booleans are TOML's.
      lines = (f"{k} = {json.dumps(v)}" for k, v in fields.items())
      self._text = "\n".join(lines)

  def read_text(self, encoding):
    assert encoding == "utf-8"
    return self._text


class EntriesTest(parameterized.TestCase):

  def test_sorted_unique_and_complete(self):
    codes = [entry.code for entry in catalog.entries()]
    self.assertEqual(codes, sorted(set(codes)))
    files = {f.stem for f in (PACKAGE / "_src" / "catalog").glob("*.toml")}
    self.assertEqual(set(codes), files)
    self.assertIs(catalog.entries(), catalog.entries())

  def test_related_codes_exist_and_are_symmetric(self):
    for entry in catalog.entries():
      self.assertNotIn(entry.code, entry.related)
      self.assertEqual(len(set(entry.related)), len(entry.related))
      for code in entry.related:
        self.assertIn(entry.code, catalog.get(code).related, code)

  def test_every_entry_has_something_to_say(self):
    for entry in catalog.entries():
      with self.subTest(entry.code):
        self.assertIn(entry.kind, catalog.KINDS)
        self.assertGreater(len(entry.meaning.split()), 12)
        self.assertGreater(len(entry.when.split()), 4)
        self.assertNotEmpty(entry.situations)
        self.assertNotEmpty(entry.fixes)
        self.assertNotEmpty(entry.related)
        self.assertNotEqual(entry.before, entry.after)
        if entry.kind == "jax":
          self.assertNotEmpty(entry.facts)  # Says where JAX raises it.
          self.assertEqual(entry.hook, "")

  def test_titles_and_messages_are_unique(self):
    titles = [entry.title for entry in catalog.entries()]
    self.assertEqual(len(set(titles)), len(titles))
    says = [text for entry in catalog.entries() for text in entry.says]
    self.assertEqual(len(set(says)), len(says))

  def test_text_is_plain_outside_of_code(self):
    # What Markdown would take for emphasis, a tag, or an unclosed code span.
    for entry in catalog.entries():
      for text in (
          entry.title, entry.meaning, entry.when, *entry.situations,
          *entry.fixes, *(f"{f.text} {f.source}" for f in entry.facts),
      ):
        self.assertEqual(text.count("`") % 2, 0, f"{entry.code}: {text}")
        plain = re.sub(r"`[^`]*`", "", text)
        self.assertNotRegex(plain, r"[*<>]|\b_|_\b", entry.code)
        self.assertNotIn("  ", text, entry.code)

  def test_get(self):
    entry = catalog.get("MGPU010")
    self.assertEqual(entry.code, "MGPU010")
    for spelling in ("mgpu010", "[MGPU010]", " MGPU010 "):
      self.assertIs(catalog.get(spelling), entry)
    for unknown in ("MGPU999", "", "Barriers are not arrays"):
      with self.assertRaises(KeyError):
        catalog.get(unknown)

  def test_to_json(self):
    for entry in catalog.entries():
      data = json.loads(json.dumps(entry.to_json()))
      self.assertEqual(data["code"], entry.code)
      self.assertEqual(data["says"], list(entry.says))
      self.assertEqual(
          data["facts"],
          [{"text": f.text, "source": f.source} for f in entry.facts],
      )

  def test_reads_no_file_and_imports_no_jax_before_the_first_call(self):
    code = """
import sys
from jax_mgpu_ext._src import catalog
assert "tomllib" not in sys.modules and "difflib" not in sys.modules
catalog.find("Barriers are not arrays")
assert "tomllib" in sys.modules and "difflib" in sys.modules
assert "jax" not in sys.modules and "numpy" not in sys.modules
"""
    run_python("-c", code).check_returncode()


class LoadTest(parameterized.TestCase):

  def test_loads_good_fields(self):
    (entry,) = catalog.load([
        FakeFile("MGPU999.toml", GOOD), FakeFile("__init__.py", "not TOML"),
    ])
    self.assertEqual(entry.code, "MGPU999")
    self.assertEqual(entry.says, ("some words {}",))
    self.assertFalse(entry.alone)
    self.assertEqual(entry.facts, ())

  def test_optional_fields(self):
    fields = {
        k: v for k, v in GOOD.items() if k not in ("hook", "since", "related")
    }
    (entry,) = catalog.load([FakeFile("MGPU999.toml", fields)])
    self.assertEqual((entry.hook, entry.since, entry.related), ("", "", ()))

  def test_facts(self):
    (entry,) = catalog.load([FakeFile(
        "MGPU999.toml",
        FakeFile("", GOOD).read_text("utf-8")
        + '\n[[facts]]\ntext = "A fact."\nsource = "A book"\n',
    )])
    self.assertEqual(
        entry.facts, (catalog.Fact(text="A fact.", source="A book"),)
    )

  @parameterized.parameters(
      *(dict(field=f, value=None) for f in GOOD
        if f not in ("hook", "since", "related")),
      dict(field="title", value=""),
      dict(field="title", value=7),
      dict(field="meaning", value="  "),
      dict(field="kind", value="theirs"),
      dict(field="exception", value="Spec Error"),
      dict(field="hook", value=["array_avals"]),
      dict(field="since", value="soon"),
      dict(field="alone", value="yes"),
      dict(field="says", value=[]),
      dict(field="says", value="some words"),
      dict(field="says", value=["some words", ""]),
      dict(field="situations", value=[1]),
      dict(field="before", value="def ("),
      dict(field="after", value="x = "),
      dict(field="related", value=["MGPU998"]),
      dict(field="related", value="MGPU998"),
      dict(field="facts", value=["A fact."]),
      dict(field="facts", value="A fact."),
      dict(field="surprise", value="!"),
  )
  def test_names_file_and_field(self, field, value):
    fields = {**GOOD, field: value}
    if value is None:
      del fields[field]
    with self.assertRaisesRegex(ValueError, rf"MGPU999\.toml.*'{field}'"):
      catalog.load([FakeFile("MGPU999.toml", fields)])

  def test_related_must_be_symmetric(self):
    one = FakeFile("MGPU998.toml", {**GOOD, "related": ["MGPU999"]})
    other = FakeFile("MGPU999.toml", GOOD)
    with self.assertRaisesRegex(ValueError, "MGPU998.*'related'.*MGPU999"):
      catalog.load([one, other])
    back = FakeFile("MGPU999.toml", {**GOOD, "related": ["MGPU998"]})
    self.assertLen(catalog.load([one, back]), 2)

  def test_names_the_file(self):
    with self.assertRaisesRegex(ValueError, "MGPU999.toml: not TOML"):
      catalog.load([FakeFile("MGPU999.toml", "title = ")])
    with self.assertRaisesRegex(ValueError, "barriers.toml: expected a name"):
      catalog.load([FakeFile("barriers.toml", GOOD)])


class ConsistencyTest(absltest.TestCase):

  def test_exceptions_exist(self):
    for entry in catalog.entries():
      module = errors if entry.kind == "ours" else builtins
      cls = getattr(module, entry.exception, None)
      self.assertIsInstance(cls, type, f"{entry.code}: {entry.exception}")
      self.assertTrue(issubclass(cls, Exception), entry.code)

  def test_codes_of_classes(self):
    for name, cls in vars(errors).items():
      if isinstance(cls, type) and isinstance(getattr(cls, "code", None), str):
        self.assertEqual(catalog.get(cls.code).exception, name)

  def test_hooks_and_their_codes(self):
    declared = {
        code: slug for slug in hooks.SLUGS for code in hooks.load(slug).codes
    }
    for code in declared:
      self.assertEqual(catalog.get(code).kind, "ours")
    for entry in catalog.entries():
      if entry.hook:
        self.assertIn(entry.hook, hooks.SLUGS, entry.code)
        self.assertEqual(declared.get(entry.code), entry.hook, entry.code)

  def test_codes_in_the_sources(self):
    used = {}
    for path in sorted(PACKAGE.rglob("*.py")):
      if "catalog" not in path.parts:
        for code in codes_in(path.read_text(encoding="utf-8")):
          used.setdefault(code, path.name)
    known = {entry.code for entry in catalog.entries()}
    self.assertEqual({c: f for c, f in used.items() if c not in known}, {})
    ours = {e.code for e in catalog.entries() if e.kind == "ours"}
    self.assertEqual(sorted(ours - set(used)), [])

  def test_codes_in_finds_codes_and_passes_over_docstrings(self):
    source = '"""As MGPU001."""\nx = f"{y} [MGPU002]"\ncode = "MGPU003"\n'
    self.assertEqual(codes_in(source), {"MGPU002", "MGPU003"})


def codes_in(source: str) -> set[str]:
  """Returns the codes in the string literals of a module, less docstrings."""
  tree = ast.parse(source)
  docstrings = {
      id(node.body[0].value)
      for node in ast.walk(tree)
      if isinstance(
          node,
          (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef),
      )
      and node.body
      and isinstance(node.body[0], ast.Expr)
  }
  return {
      code
      for node in ast.walk(tree)
      if isinstance(node, ast.Constant) and isinstance(node.value, str)
      and id(node) not in docstrings
      for code in CODE.findall(node.value)
  }


# Values that messages are filled with.
VALUES = (
    "3",
    "(100, 100)",
    "'y'",
    "Barrier(num_arrivals=1, num_barriers=(2,), orders_tensor_core=False)",
    "['x', 'z']",
    "<class 'float'>",
    "ShapeDtypeStruct((128,), float32)",
)

TRACEBACK = """\
Traceback (most recent call last):
  File "/home/me/kernels/gemm.py", line 214, in <module>
    out = run(x)
  File "/opt/lib/python3.12/site-packages/jax/_src/pallas/mosaic_gpu/core.py", line 412, in kernel
    mesh = Mesh(
           ^^^^^
  File "/opt/lib/python3.12/site-packages/jax/_src/traceback_util.py", line 195, in reraise_with_filtered_traceback
    return fun(*args, **kwargs)
           ^^^^^^^^^^^^^^^^^^^^
%s: %s
--------------------
For simplicity, JAX has removed its internal frames from the traceback of the
following exception. Set JAX_TRACEBACK_FILTERING=off to include these.
"""


def filled(template: str, shift: int) -> str:
  """Returns a message with a value for each `{}`."""
  values = iter(VALUES[shift % len(VALUES):] + VALUES)
  return re.sub(r"\{\}", lambda _: next(values), template)


def without_a_letter(message: str) -> str:
  """Drops the third letter of the longest plain word."""
  word = max(filter(str.isalpha, message.split()), key=len, default="")
  return message.replace(word, word[:2] + word[3:]) if word else message


FORMS = dict(
    as_it_is=lambda entry, message: message,
    upper_case=lambda entry, message: message.upper(),
    lower_case=lambda entry, message: message.lower(),
    with_type=lambda entry, message: f"{entry.exception}: {message}",
    in_traceback=lambda entry, message: TRACEBACK % (entry.exception, message),
    with_line_breaks=lambda entry, message: "\n".join(
        textwrap.wrap(f"{entry.exception}: {message}", 40)
    ),
    indented=lambda entry, message: textwrap.indent(
        "\n".join(textwrap.wrap(message, 30)), "  | "
    ),
    coloured=lambda entry, message: f"\x1b[1;31m{message}\x1b[0m",
    with_path_and_hint=lambda entry, message: (
        f"{message} (at scratch_types['ring'].full). Write something else"
    ),
)


class FindTest(parameterized.TestCase):

  def assert_first(self, text, code):
    found = [(entry.code, score) for entry, score in catalog.find(text)]
    self.assertTrue(found, f"nothing found for {text!r}")
    self.assertEqual(found[0][0], code, f"{found} for {text!r}")

  @parameterized.named_parameters(FORMS.items())
  def test_messages(self, form):
    for entry in catalog.entries():
      for shift, template in enumerate(entry.says):
        with self.subTest(code=entry.code, says=template):
          self.assert_first(form(entry, filled(template, shift)), entry.code)

  def test_misspelt_messages(self):
    for entry in catalog.entries():
      for shift, template in enumerate(entry.says):
        with self.subTest(code=entry.code, says=template):
          message = without_a_letter(filled(template, shift))
          self.assert_first(message, entry.code)

  def test_titles_and_codes(self):
    for entry in catalog.entries():
      self.assert_first(entry.title, entry.code)
      self.assert_first(entry.title.lower(), entry.code)
      for text in (entry.code, entry.code.lower(), f"... [{entry.code}]"):
        self.assertEqual(catalog.find(text)[0], (entry, 1.0))

  def test_a_code_counts_more_than_the_text_around_it(self):
    text = "Barriers are not arrays, and more words that say so [MGPU052]"
    self.assertEqual(
        [entry.code for entry, _ in catalog.find(text)[:2]],
        ["MGPU052", "MGPU010"],
    )

  @parameterized.parameters(
      ("Cluster barriers are", "MGPU011"),
      ("barriers are not arrays", "MGPU010"),
      ("Cluster bariers are not arays", "MGPU011"),
      ("cluster axis y, available", "MGPU030"),
      ("Unknown cluster ax...", "MGPU030"),
      ("at least 1, but got 0", "MGPU021"),
      ("num arrivals must be at most", "MGPU021"),
      ("swizzle", "MGPU052"),
      ("tiling does not divide", "MGPU050"),
      ("must divide the last dimensions", "MGPU050"),
      ("requires the trailing dimension to be of", "MGPU052"),
      ("All aliased Refs must have the same memory", "MGPU041"),
      ("Allowed types: `pl.Squeezed`, `pl.Blocked`", "MGPU070"),
      ("pipeline_mode= is not", "MGPU071"),
      ("packed cannot be specified", "MGPU072"),
      ("only supported for TMEM", "MGPU073"),
      ("TMEM transforms", "MGPU074"),
      ("dtypes narrower than 32", "MGPU075"),
      ("cannot return semaphores", "MGPU076"),
      ("Individual barriers can be accessed", "MGPU077"),
      ("add collective_axes=wg to your run_scoped", "MGPU079"),
      ("ClusterAxisError", "MGPU030"),
      ("TilingError", "MGPU050"),
      ("Mesh.__init__() got an unexpected keyword argument 'out_sh", "MGPU060"),
      ("Mesh.__init__() got an unexpected keyword argument 'nam", "MGPU061"),
      ("object has no attribute 'get_ref_aval'", "MGPU001"),
      ("WGMMAAccumulatorRef has no get_array_aval", "MGPU012"),
  )
  def test_fragments(self, text, code):
    self.assert_first(text, code)

  def test_fragment_of_a_message_that_is_long(self):
    for entry in catalog.entries():
      for template in entry.says:
        words = filled(template, 0).split()
        if len(words) >= 12:
          first, last = words[: len(words) * 2 // 3], words[len(words) // 3:]
          self.assert_first(" ".join(first), entry.code)
          self.assert_first(" ".join(last), entry.code)

  @parameterized.parameters(
      "",
      " \n ",
      "hello world",
      "asdf",
      "xyzzy plugh",
      "1234",
      "MGPU999",
      "the quick brown fox jumps over the lazy dog",
      "lorem ipsum dolor sit amet consectetur",
      "KeyError: 'foo'",
      "AssertionError",
      "ValueError",
      "ModuleNotFoundError: No module named 'numpy'",
      "FileNotFoundError: [Errno 2] No such file or directory: 'kernel.py'",
      "SyntaxError: invalid syntax",
      "IndexError: list index out of range",
      "TypeError: 'int' object is not iterable",
      "TypeError: unsupported operand type(s) for +: 'int' and 'str'",
      "TypeError: f() got an unexpected keyword argument 'bar'",
      "TypeError: f() missing 1 required positional argument: 'x'",
      "AttributeError: 'NoneType' object has no attribute 'foo'",
      "ValueError: not enough values to unpack (expected 2, got 1)",
      "ValueError: operands could not be broadcast together with shapes (3,)",
      "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 137 bytes.",
      "RuntimeError: CUDA error: an illegal memory access was encountered",
      "nvcc fatal: Unsupported gpu architecture 'compute_75'",
      "jax.errors.TracerArrayConversionError: The numpy.ndarray conversion"
      " method __array__() was called on traced array with shape float32[3]",
      TRACEBACK % ("KeyError", "'foo'"),
  )
  def test_nonsense_finds_nothing(self, text):
    found = [(entry.code, score) for entry, score in catalog.find(text)]
    self.assertEqual(found, [])

  def test_limit_and_order(self):
    found = catalog.find("barrier", limit=3)
    self.assertLessEqual(len(found), 3)
    many = catalog.find("barriers are not arrays", limit=99)
    scores = [score for _, score in many]
    self.assertEqual(scores, sorted(scores, reverse=True))
    self.assertTrue(all(0 < score <= 1 for score in scores))
    self.assertEqual(catalog.find("Barriers are not arrays", limit=0), [])

  def test_a_long_log(self):
    noise = "\n".join(f"step {i}: loss {i / 7}" for i in range(5000))
    text = f"{noise}\nValueError: Cluster barriers are not arrays\n{noise}"
    self.assert_first(text, "MGPU011")
    self.assertEqual(catalog.find(noise), [])


class DocumentsTest(absltest.TestCase):

  def test_errors_md_is_current(self):
    result = run_python(str(ROOT / "tools" / "gen_errors_doc.py"), "--check")
    self.assertEqual(result.returncode, 0, result.stderr)

  def test_check_notices_a_stale_file_and_writing_mends_it(self):
    tool = load_tool()
    with tempfile.TemporaryDirectory() as folder:
      tool.PATH = pathlib.Path(folder) / "docs" / "errors.md"
      tool._ROOT = pathlib.Path(folder)
      self.assertEqual(tool.main(["--check"]), 1)
      self.assertEqual(tool.main([]), 0)
      self.assertEqual(tool.main(["--check"]), 0)
      self.assertEqual(os.listdir(tool.PATH.parent), ["errors.md"])
      tool.PATH.write_text("stale", encoding="utf-8")
      self.assertEqual(tool.main(["--check"]), 1)
      self.assertEqual(tool.PATH.read_text(encoding="utf-8"), "stale")

  def test_errors_md_has_everything(self):
    text = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    flat = " ".join(text.split())
    for entry in catalog.entries():
      for piece in (
          entry.title, entry.exception, entry.meaning, entry.when, entry.before,
          entry.after, *entry.says, *entry.situations, *entry.fixes,
          *(fact.text for fact in entry.facts),
      ):
        self.assertIn(" ".join(piece.split()), flat, entry.code)

  def test_links_of_errors_md(self):
    text = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    anchors = {
        re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings
    }
    links = set(re.findall(r"\(#([^)]*)\)", text))
    self.assertLessEqual(links, anchors)
    self.assertGreaterEqual(len(links), len(catalog.entries()))

  def test_terms_md_has_the_words(self):
    text = (ROOT / "docs" / "terms.md").read_text(encoding="utf-8")
    for word in (
        "num_stages", "stage", "index", "phase", "phase_number", "full",
        "empty", "producer", "consumer", "producer_acquire", "producer_commit",
        "producer_tail", "consumer_wait", "consumer_release", "num_arrivals",
        "num_barriers", "slug",
    ):
      self.assertRegex(text, rf"\| [^|]*`?\b{word}\b`?[^|]* \|", word)


# Runs snippets one after the other; each one is given a copy of the prelude's
# names. Reads and writes JSON.
SNIPPET_RUNNER = """
import json, sys, warnings
request = json.load(sys.stdin)
warnings.simplefilter("ignore")
prelude = {}
exec(request["prelude"], prelude)
results = {"version": prelude["jax"].__version__}
for name, code in request["snippets"].items():
  try:
    exec(compile(code, name, "exec"), {**prelude, "__name__": name})
    results[name] = None
  except Exception as e:
    results[name] = [[c.__name__ for c in type(e).__mro__], str(e)]
json.dump(results, sys.stdout)
"""


def run_python(*args: str, **kwargs) -> subprocess.CompletedProcess:
  """Runs a child that can import this checkout, on the CPU, hooks on."""
  env = {**os.environ, "JAX_PLATFORMS": "cpu"}
  for name in ("JAX_MGPU_EXT", "JAX_MGPU_EXT_DISABLE"):
    env.pop(name, None)
  paths = [str(ROOT), env.get("PYTHONPATH", "")]
  env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
  return subprocess.run(
      [sys.executable, *args], capture_output=True, text=True, env=env,
      timeout=120, check=False, **kwargs,
  )


def load_tool():
  spec = importlib.util.spec_from_file_location(
      "gen_errors_doc", ROOT / "tools" / "gen_errors_doc.py"
  )
  tool = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(tool)
  return tool


def applies(entry: catalog.Entry) -> bool:
  """Returns whether the running JAX can show the example of an entry.

  What it cannot show may hang there.
  """
  version = releases.key(importlib.metadata.version("jax"))
  return not entry.since or releases.key(entry.since) <= version


@functools.cache
def snippet_results() -> dict:
  snippets = {
      f"{entry.code}.{name}": getattr(entry, name)
      for entry in catalog.entries()
      if not entry.alone and applies(entry)
      for name in ("before", "after")
  }
  request = dict(prelude=catalog.PRELUDE, snippets=snippets)
  result = run_python("-c", SNIPPET_RUNNER, input=json.dumps(request))
  if result.returncode:
    raise AssertionError(result.stderr)
  return json.loads(result.stdout)


def run_program(code: str) -> subprocess.CompletedProcess:
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / "program.py"
    path.write_text(code + "\n", encoding="utf-8")
    return run_python("-W", "always", str(path))


def says_so(entry: catalog.Entry, text: str) -> bool:
  """Returns whether a text has one of the entry's messages in it."""
  return any(
      re.search(".*?".join(map(re.escape, template.split("{}"))), text, re.S)
      for template in entry.says
  )


class ExamplesTest(absltest.TestCase):

  def snippet_entries(self):
    """Entries whose example the running JAX can show."""
    for entry in catalog.entries():
      if not entry.alone and applies(entry):
        yield entry

  def test_before_fails_as_said(self):
    for entry in self.snippet_entries():
      with self.subTest(entry.code):
        result = snippet_results()[f"{entry.code}.before"]
        self.assertIsNotNone(result, "nothing was raised")
        names, text = result
        self.assertIn(entry.exception, names, text)
        self.assertTrue(says_so(entry, text), text)
        if entry.kind == "ours":
          self.assertIn(f"[{entry.code}]", text)
        else:
          self.assertNotRegex(text, CODE)
        # And the reader who pastes the text finds the entry, code or no code.
        for pasted in (text, CODE.sub("", text), f"{names[0]}: {text}"):
          self.assertEqual(catalog.find(pasted)[0][0].code, entry.code, pasted)

  def test_after_works(self):
    for entry in self.snippet_entries():
      with self.subTest(entry.code):
        self.assertIsNone(snippet_results()[f"{entry.code}.after"])

  def test_most_examples_run_on_every_release(self):
    # Those about interpret mode need the interpreter of a later release.
    snippets = [
        entry for entry in catalog.entries()
        if not entry.alone and not entry.code.startswith("DL")
    ]
    found = [e for e in self.snippet_entries() if not e.code.startswith("DL")]
    self.assertGreaterEqual(len(found), len(snippets) - 4)

  def test_whole_programs(self):
    entries = [
        entry
        for entry in catalog.entries()
        if entry.alone and not (entry.extra and aot_support.why_not())
    ]
    self.assertNotEmpty(entries)
    with futures.ThreadPoolExecutor(2) as pool:
      befores = pool.map(run_program, [entry.before for entry in entries])
      afters = pool.map(run_program, [entry.after for entry in entries])
      results = list(zip(entries, befores, afters))
    for entry, before, after in results:
      with self.subTest(entry.code):
        is_warning = issubclass(getattr(errors, entry.exception), Warning)
        self.assertEqual(before.returncode, 0 if is_warning else 1)
        text = " ".join(before.stderr.split())
        self.assertIn(f"{entry.exception}: ", text)
        self.assertIn(f"[{entry.code}]", text)
        self.assertTrue(says_so(entry, text), text)
        self.assertEqual(catalog.find(text)[0][0].code, entry.code)
        self.assertEqual(after.returncode, 0, after.stderr)
        self.assertNotRegex(after.stderr, CODE)


if __name__ == "__main__":
  absltest.main()
