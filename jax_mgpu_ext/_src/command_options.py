"""Options that several commands of `mgpu-ext` have, and what they stand for."""

from __future__ import annotations

from collections.abc import Callable
import contextlib
import math
import sys
from typing import Annotated

import typer

from jax_mgpu_ext._src import streams

Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON document instead.")
]


def is_count(text: str) -> bool:
  """Whether a text is a whole number from 1 on."""
  # More digits than Python reads, 4300, are no number that anybody means.
  is_number = text.isascii() and text.isdecimal() and len(text) < 10
  return is_number and int(text) > 0


def count(text: str) -> int:
  """Parses the value of an option that counts something."""
  if not is_count(text):
    raise typer.BadParameter(f"expected a whole number from 1 on, got {text!r}")
  return int(text)


def seconds(text: str) -> float:
  """Parses the value of an option that is a time."""
  try:
    number = float(text)
  except ValueError:
    number = math.nan
  if not (number > 0 and math.isfinite(number)):
    raise typer.BadParameter(
        f"expected a positive number of seconds, got {text!r}"
    )
  return number


Jobs = Annotated[
    int | None,
    typer.Option(
        parser=count,
        metavar="N",
        help="Cases or configurations at a time; one per core by default.",
    ),
]


def progress(
    stack: contextlib.ExitStack, as_json: bool, what: str
) -> Callable[[int, int], None] | None:
  """Returns what shows progress, on a terminal, or None."""
  if not as_json and sys.stdout.isatty() and sys.stderr.isatty():
    return stack.enter_context(streams.progress_bar(what))
  return None
