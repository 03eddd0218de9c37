"""The error catalog: one TOML file per code, read on first use.

The file's name is the code (`MGPU012.toml`). `entries()` and `get()` give the
entries, `find()` looks one up from whatever a reader has at hand: a code, a
title, or a message copied from a terminal. Nothing here imports JAX, and no
file is read before the first call.
"""

from __future__ import annotations

from collections.abc import Iterable
import dataclasses
import functools
from importlib import resources
import re
from typing import Any, Protocol

KINDS = ("ours", "jax")

# What every example may use without saying so. Examples marked `alone` are
# whole programs, because they are about the order of imports.
PRELUDE = '''\
import jax
import jax.numpy as jnp
import numpy as np
import jax_mgpu_ext
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

x = jnp.zeros((128,), jnp.float32)
OUT = jax.ShapeDtypeStruct((128,), jnp.float32)

def lower(kernel, *args):
  """Traces and lowers `kernel` for CUDA, which needs no GPU."""
  return jax.jit(kernel).trace(*args).lower(lowering_platforms=("cuda",))
'''

_CODE = re.compile(r"(?:MGPU|DL)\d{3}")
_RELEASE = re.compile(r"\d+(\.\d+)+")


class _File(Protocol):
  """What is read of a file: `pathlib.Path` and package resources have both."""

  name: str

  def read_text(self, encoding: str) -> str:
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fact:
  """A number or rule an entry relies on, and who says so.

  Attributes:
    text: The fact in one sentence, with its unit.
    source: The section of the manual, or the symbol in JAX, that states it.
  """

  text: str
  source: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
  """What there is to know about one error or warning.

  Attributes:
    code: `MGPU`, or `DL` for how an interpreted kernel ended, and three digits;
      never changes its meaning.
    title: One short line.
    kind: `ours`, or `jax` for an error that JAX raises by itself.
    exception: Name of the class that is raised or, for a warning, issued.
    hook: Slug of the hook that raises it; empty if no hook does.
    since: First JAX release on which the example applies; empty for all.
    alone: Whether the example is a whole program rather than a snippet that
      follows `PRELUDE`.
    extra: The extra of this package that the example needs; empty for none.
    says: Pieces of the message, `{}` standing for a value.
    meaning: What is wrong.
    when: At which moment it is raised, and what JAX alone does there.
    situations: How people get there.
    fixes: What to do, most likely first.
    before: Code that fails with this error.
    after: The same code, mended.
    facts: The numbers behind it.
    related: Codes of entries worth reading next.
  """

  code: str
  title: str
  kind: str
  exception: str
  hook: str = ""
  since: str = ""
  alone: bool = False
  extra: str = ""
  says: tuple[str, ...]
  meaning: str
  when: str
  situations: tuple[str, ...]
  fixes: tuple[str, ...]
  before: str
  after: str
  facts: tuple[Fact, ...] = ()
  related: tuple[str, ...] = ()

  def to_json(self) -> dict[str, Any]:
    """Returns the entry as plain lists, dicts, strings and booleans."""
    data = dataclasses.asdict(self)
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in data.items()
    }


@functools.cache
def entries() -> tuple[Entry, ...]:
  """Returns every entry, sorted by code.

  Raises:
    ValueError: A catalog file is malformed; the text names file and field.
  """
  return load(resources.files(__package__).iterdir())


def get(code: str) -> Entry:
  """Returns the entry of `code`, as `MGPU012`; upper or lower case.

  Raises:
    KeyError: There is no such code.
  """
  return _by_code()[code.strip().strip("[]").upper()]


def find(text: str, limit: int = 5) -> list[tuple[Entry, float]]:
  """Finds the entries that a text is likely to be about.

  Args:
    text: A code, a title, or a message or traceback as copied from a terminal;
      values, line breaks, letter case and missing ends do not matter.
    limit: At most so many entries are returned.

  Returns:
    `(entry, score)` pairs, best first, scores in (0, 1]; empty if nothing in
    the catalog resembles the text.
  """
  scores = _index().scores(text)
  best = sorted(scores.items(), key=lambda item: (-item[1], item[0]))
  return [(get(code), score) for code, score in best[:limit]]


def load(files: Iterable[_File]) -> tuple[Entry, ...]:
  """Reads catalog files and checks them.

  Args:
    files: Anything with a `name` and `read_text`; names that do not end in
      `.toml` are passed over.

  Returns:
    The entries, sorted by code.

  Raises:
    ValueError: A file is malformed; the text names file and field.
  """
  import tomllib  # Not before somebody asks.

  found: dict[str, Entry] = {}
  for file in files:
    if not file.name.endswith(".toml"):
      continue
    try:
      data = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
      raise ValueError(f"catalog file {file.name}: not TOML: {e}") from e
    entry = _entry(file.name, data)
    found[entry.code] = entry
  for entry in found.values():
    for other in entry.related:
      where = f"catalog file {entry.code}.toml: field 'related'"
      if other not in found:
        raise ValueError(f"{where} names {other}, which has no entry")
      if entry.code not in found[other].related:
        raise ValueError(f"{where} names {other}, which does not name it back")
  return tuple(found[code] for code in sorted(found))


@functools.cache
def _by_code() -> dict[str, Entry]:
  return {entry.code: entry for entry in entries()}


@functools.cache
def _index():
  from jax_mgpu_ext._src.catalog import matching

  return matching.Index({
      entry.code: (entry.says, entry.title, entry.exception)
      for entry in entries()
  })


def _entry(name: str, data: dict[str, Any]) -> Entry:
  """Checks the fields of one file and makes an `Entry` of them."""
  code = name.removesuffix(".toml")
  if not _CODE.fullmatch(code):
    raise ValueError(
        f"catalog file {name}: expected a name like MGPU012.toml"
    )

  def fail(field: str, expected: str):
    raise ValueError(
        f"catalog file {name}: field {field!r} must be {expected}, got"
        f" {field}={data.get(field)!r}"
    )

  fields = {f.name: f for f in dataclasses.fields(Entry) if f.name != "code"}
  for field in data:
    if field not in fields:
      raise ValueError(
          f"catalog file {name}: unknown field {field!r} (known:"
          f" {', '.join(fields)})"
      )
  values: dict[str, Any] = {"code": code}
  for field, spec in fields.items():
    required = spec.default is dataclasses.MISSING
    if field not in data:
      if required:
        raise ValueError(f"catalog file {name}: field {field!r} is missing")
      continue
    value = data[field]
    if field == "facts":
      values[field] = _facts(value, fail)
    elif isinstance(spec.default, bool):
      if not isinstance(value, bool):
        fail(field, "true or false")
      values[field] = value
    elif spec.type.startswith("tuple"):
      if not isinstance(value, list) or not all(_is_text(v) for v in value):
        fail(field, "a list of non-empty strings")
      if required and not value:
        fail(field, "a list of at least one string")
      values[field] = tuple(v.strip() for v in value)
    else:
      if not isinstance(value, str) or (required and not _is_text(value)):
        fail(field, "a non-empty string" if required else "a string")
      values[field] = value.strip()
  if values["kind"] not in KINDS:
    fail("kind", f"one of {', '.join(KINDS)}")
  if not values["exception"].isidentifier():
    fail("exception", "the name of a class")
  if values.get("since") and not _RELEASE.fullmatch(values["since"]):
    fail("since", "a release, as 0.11.2")
  for field in ("before", "after"):
    try:
      compile(values[field], f"{code}.{field}", "exec")
    except SyntaxError as e:
      fail(field, f"Python code ({e})")
  return Entry(**values)


def _facts(value: Any, fail) -> tuple[Fact, ...]:
  expected = "a list of tables with the two strings `text` and `source`"
  if not isinstance(value, list):
    fail("facts", expected)
  for fact in value:
    if (
        not isinstance(fact, dict)
        or set(fact) != {"text", "source"}
        or not all(_is_text(v) for v in fact.values())
    ):
      fail("facts", expected)
  return tuple(Fact(**{k: v.strip() for k, v in f.items()}) for f in value)


def _is_text(value: Any) -> bool:
  return isinstance(value, str) and bool(value.strip())
