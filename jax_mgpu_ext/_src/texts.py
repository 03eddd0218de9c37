"""Texts of other people in our messages: whatever they are, they are shown."""

from __future__ import annotations

# How much of other people's text is shown: a message, and the lines below it.
MESSAGE_CHARS = 2000
DETAILS_CHARS = 8000


def text_of(error: object) -> str:
  """Returns the text of an exception, whatever its `__str__` does."""
  try:
    return str(error)
  except BaseException as own:  # pylint: disable=broad-exception-caught
    return f"(its own text cannot be had: {type(own).__name__})"


def shorten(text: str, chars: int = MESSAGE_CHARS) -> str:
  """Leaves out the middle of a text that is too long."""
  if len(text) <= chars:
    return text
  tail = chars // 3  # The place that an error comes from is often there.
  head = chars - tail
  left_out = len(text) - chars
  return f"{text[:head]} [... {left_out} characters ...] {text[-tail:]}"
