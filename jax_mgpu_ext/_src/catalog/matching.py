"""Finds the catalog entry that a piece of text is about.

Pure text work on templates, in which `{}` stands for a value. Three ways, in
falling order of trust:

1. a code in the text;
2. a whole template that occurs in the text, whatever its values are, or a text
   that occurs in a template letter by letter;
3. words, and pairs of neighbouring words, that a template shares with a line
   of the text or with a few lines in a row. Rare ones count for more, and a
   misspelt word counts as the one it resembles. This finds fragments.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterable, Mapping
import difflib
import math
import re
from typing import NamedTuple

# Scores of the three ways; fuzzy scores stay below a whole template's.
_CODE_SCORE = 1.0
_TEMPLATE_SCORE = 0.9
_VERBATIM_SCORE = 0.89
_FUZZY_SCALE = 0.8
# What a text gains that follows the template letter by letter.
_LETTERS_SCALE = 0.13
# What an entry gains whose exception class the text names.
_CLASS_GAIN = 0.005
# Below this, a fuzzy match says nothing. Set so that the messages of other
# libraries in `catalog_test.py` find nothing and half a message of ours does.
_THRESHOLD = 0.55
# Shared weight at which a fuzzy match counts for 63 %; a word that only one
# entry has weighs 1.
_EVIDENCE = 0.6
# A word of the text that no template has: an identifier, a path, a value.
_UNKNOWN_WEIGHT = 0.5
# A value longer than this is taken for text that belongs to something else.
_LONGEST_VALUE = 300
# A message is seldom wrapped into more lines; a longer text is a traceback.
_LINES_IN_A_ROW = 4
_LONGEST_FRAGMENT = 2000
# So many lines of a log are looked through for parts of a message.
_LONGEST_TEXT = 500
# From this likeness on, a word is a misspelling of another one.
_CLOSE = 0.8

_CODES = re.compile(r"\b(?:MGPU|DL)\d{3}\b", re.IGNORECASE)
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# What Python writes before a message.
_BEGINNING = re.compile(r"^[\w. ]+(error|warning|exception): ")
_WORD = re.compile(r"[a-z][a-z0-9]+")
# Words that any English sentence, traceback or message of Python may have;
# they are no evidence.
_COMMON = frozenset(
    "all an and any are as at be because before but by call can cannot do does"
    " for from has have if import in instead into is it its last most must my"
    " need no none not of on one only or out recent see should so such than"
    " that the their them there these this to true false two use used using"
    " was were what when where which while with without write you your"
    " argument attribute bool class code error exception expected file first"
    " float found function get got index int integer invalid item iterable key"
    " keyword line list message missing module name number object positional"
    " py python range required return self sequence set size str string"
    " traceback tuple type unexpected value"
    .split()
)


class _Line(NamedTuple):
  """The evidence in one line, or template: words and neighbouring pairs."""

  features: frozenset[str]
  words: frozenset[str]


class Index:
  """Everything that may be matched, prepared once.

  Args:
    texts: By code, the templates, the title and the exception class' name.
  """

  def __init__(self, texts: Mapping[str, tuple[Iterable[str], str, str]]):
    self._codes = frozenset(texts)
    self._patterns: list[tuple[str, re.Pattern[str], int]] = []
    self._templates: list[tuple[str, str, _Line]] = []
    self._classes: dict[str, set[str]] = {}
    holders: dict[str, set[str]] = {}
    for code, (says, title, exception) in texts.items():
      self._classes.setdefault(exception, set()).add(code)
      for template in (*says, title):
        text = normalize(template)
        pieces = [p for p in map(str.strip, text.split("{}")) if p]
        value = rf".{{0,{_LONGEST_VALUE}}}?"
        pattern = re.compile(value.join(map(re.escape, pieces)))
        self._patterns.append((code, pattern, sum(map(len, pieces))))
        line = _line(text.split("{}"))
        self._templates.append((code, text, line))
        for feature in line.features:
          holders.setdefault(feature, set()).add(code)
    scale = math.log(len(texts) + 1)
    self._weights = {
        feature: 1 - math.log(len(codes)) / scale
        for feature, codes in holders.items()
    }
    # By first letter: people mistype the middle of words, and it keeps the
    # search for a word's like short.
    self._vocabulary: dict[str, list[str]] = {}
    words = (line.words for _, _, line in self._templates)
    for word in sorted(_COMMON.union(*words)):
      self._vocabulary.setdefault(word[0], []).append(word)

  def scores(self, text: str) -> dict[str, float]:
    """Returns the score of each code that `text` may be about, in (0, 1]."""
    flat = normalize(text)
    scores: dict[str, float] = {}

    def note(code: str, score: float):
      if score > scores.get(code, 0.0):
        scores[code] = score

    for code, pattern, length in self._patterns:
      if pattern.search(flat):
        # The longest template that fits is the most specific one.
        note(code, _TEMPLATE_SCORE + 0.09 * length / (length + 60))
    lines = [line for line in map(normalize, text.splitlines()) if line]
    is_fragment = (
        len(lines) <= _LINES_IN_A_ROW and len(flat) <= _LONGEST_FRAGMENT
    )
    piece = _BEGINNING.sub("", flat).rstrip(". ")
    if is_fragment and _line([piece]).features:
      # It may end in the middle of a word, but not begin in one.
      verbatim = re.compile(rf"(?<!\w){re.escape(piece)}")
      for code, template, _ in self._templates:
        if verbatim.search(template):
          note(code, _VERBATIM_SCORE)
    # An error stands at the end of a log, if not in full anywhere.
    for window in self._windows(lines[-_LONGEST_TEXT:]):
      for code, template, line in self._templates:
        score = self._similarity(line, window, is_fragment)
        if is_fragment and score * _FUZZY_SCALE >= _THRESHOLD:
          score += _LETTERS_SCALE * _letters(template, flat)
        note(code, _FUZZY_SCALE * score)
    for name, codes in self._classes.items():
      if not hasattr(builtins, name) and _has_word(name.lower(), flat):
        for code in codes:
          # The bare name of a class is a question for its entries, if they
          # are few; in a longer text it only decides between equals.
          note(code, 0.6 if flat == name.lower() and len(codes) < 5 else 0.0)
          scores[code] = scores.get(code, 0.0) + _CLASS_GAIN
    for code in map(str.upper, _CODES.findall(text)):
      if code in self._codes:
        scores[code] = _CODE_SCORE
    return {c: round(s, 4) for c, s in scores.items() if s >= _THRESHOLD}

  def _windows(self, lines: list[str]) -> list[_Line]:
    """Each line, and each few lines in a row, as one."""
    # Once each: a traceback repeats itself, and recursion does so a lot.
    seen: dict[_Line, None] = {}
    words = {word for line in lines for word in _WORD.findall(line)}
    spelling = {word: self._spelled(word) for word in words}
    spelled = [_WORD.sub(lambda m: spelling[m[0]], line) for line in lines]
    for first in range(len(lines)):
      for last in range(first + 1, first + 1 + _LINES_IN_A_ROW):
        if last <= len(lines):
          seen.setdefault(_line([" ".join(spelled[first:last])]))
    return [line for line in seen if line.features]

  def _spelled(self, word: str) -> str:
    """Returns the catalog's word for a word that is nearly one."""
    alike = self._vocabulary.get(word[0], ())
    stem = _stem(word)
    if len(word) < 5 or stem in alike:
      return word
    close = difflib.get_close_matches(stem, alike, 1, _CLOSE)
    return close[0] if close else word

  def _similarity(
      self, template: _Line, line: _Line, is_fragment: bool
  ) -> float:
    """Returns how much of one is in the other, in [0, 1]."""
    shared = template.features & line.features
    if not shared:
      return 0.0
    common = sum(map(self._weight, shared))
    of_template = common / sum(map(self._weight, template.features))
    of_line = common / sum(map(self._weight, line.features))
    # A message inside other text has all of the template in it; of a fragment,
    # all is in the template. A line of a traceback is not a fragment: it would
    # match by a single word.
    larger = max(of_template, of_line) if is_fragment else of_template
    smaller = min(of_template, of_line)
    evidence = 1 - math.exp(-common / _EVIDENCE)
    return evidence * larger * (0.75 + 0.25 * smaller)

  def _weight(self, feature: str) -> float:
    unknown = 0.0 if " " in feature else _UNKNOWN_WEIGHT
    return self._weights.get(feature, unknown)


def normalize(text: str) -> str:
  """Lower case, no terminal colours, all white space single blanks.

  `num_arrivals` and "num arrivals" become the same words.
  """
  return " ".join(_ANSI.sub("", text).replace("_", " ").lower().split())


def _line(parts: Iterable[str]) -> _Line:
  """Returns the words and neighbouring pairs of texts cut at their values."""
  words: set[str] = set()
  pairs: set[str] = set()
  for part in parts:
    found = list(map(_stem, _WORD.findall(part)))
    words.update(word for word in found if word not in _COMMON)
    pairs.update(
        f"{a} {b}"
        for a, b in zip(found, found[1:])
        if not (a in _COMMON and b in _COMMON)
    )
  return _Line(frozenset(words | pairs), frozenset(words))


def _stem(word: str) -> str:
  """Takes a plural for its singular."""
  return word.removesuffix("s") if len(word) > 4 and word[-2] != "s" else word


def _letters(template: str, text: str) -> float:
  """Returns how much of a short text follows a template, in [0, 1]."""
  matcher = difflib.SequenceMatcher(None, template, text, autojunk=False)
  blocks = matcher.get_matching_blocks()
  return sum(b.size for b in blocks if b.size > 3) / len(text)


def _has_word(word: str, text: str) -> bool:
  return re.search(rf"\b{re.escape(word)}\b", text) is not None
