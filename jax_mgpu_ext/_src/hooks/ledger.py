"""Saves what a hook replaces, and puts it back in reverse order."""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import sys
from typing import Any
import warnings

from jax_mgpu_ext._src import errors
from jax_mgpu_ext._src.hooks import contract

_MISSING = object()


@dataclasses.dataclass(frozen=True)
class _Entry:
  """One replacement: `owner.key` or `owner[key]`, and what stood there."""

  owner: Any
  key: Any
  is_item: bool
  original: Any
  value: Any
  aliases: tuple[str, ...] = ()

  def read(self) -> Any:
    if self.is_item:
      return self.owner.get(self.key, _MISSING)
    return vars(self.owner).get(self.key, _MISSING)

  def write(self, value: Any) -> None:
    if self.is_item:
      if value is _MISSING:
        del self.owner[self.key]
      else:
        self.owner[self.key] = value
    elif value is _MISSING:
      delattr(self.owner, self.key)
    else:
      setattr(self.owner, self.key, value)


class Ledger:
  """The replacements of one hook, in the order in which they were made.

  Only to be used under the engine's lock.
  """

  def __init__(self):
    self._entries: list[_Entry] = []

  def replace(
      self, target: contract.Target, wrap: Callable[[Any], Any]
  ) -> None:
    """Replaces a target by `wrap(what stands there)`, aliases included."""
    owner = target.owner()
    self.set_attr(
        owner, target.attribute, wrap(target.current()), target.aliases
    )

  def set_attr(
      self,
      owner: Any,
      name: str,
      value: Any,
      aliases: tuple[str, ...] = (),
  ) -> None:
    """Sets `owner.name`, and every alias that holds the old object.

    Args:
      owner: A module or a class.
      name: The attribute; it need not exist yet.
      value: The replacement.
      aliases: `module:name` of other bindings. Modules that are not imported
        yet will bind the replacement by themselves.
    """
    # The raw attribute, not `getattr`: a descriptor bound by `getattr` is not
    # what has to be put back, and an inherited one must not be copied down.
    original = vars(owner).get(name, _MISSING)
    entry = _Entry(owner, name, False, original, value, aliases)
    entry.write(value)
    self._entries.append(entry)
    _rebind(aliases, original, value)

  def set_item(self, mapping: dict[Any, Any], key: Any, value: Any) -> None:
    """Sets `mapping[key]`, which need not exist yet."""
    entry = _Entry(mapping, key, True, mapping.get(key, _MISSING), value)
    entry.write(value)
    self._entries.append(entry)

  def replaced(self) -> list[tuple[Any, Any]]:
    """Returns (original, replacement) of every attribute that existed."""
    return [
        (entry.original, entry.value)
        for entry in self._entries
        if not entry.is_item and entry.original is not _MISSING
    ]

  def rollback(self) -> None:
    """Restores everything, last change first.

    What somebody else has replaced since then is left as it is, with a
    `ForeignPatchWarning` that names it.
    """
    foreign = []
    while self._entries:
      entry = self._entries.pop()
      if entry.read() is entry.value:
        entry.write(entry.original)
        _rebind(entry.aliases, entry.value, entry.original)
      else:
        foreign.append(f"{getattr(entry.owner, '__name__', '')}.{entry.key}")
    if foreign:
      warnings.warn(
          f"Left as they are, since other code has replaced them after"
          f" jax_mgpu_ext did: {', '.join(foreign)}. Undo that replacement"
          " first, then deactivate [MGPU093]",
          errors.ForeignPatchWarning,
          stacklevel=3,
      )


def _rebind(aliases: tuple[str, ...], old: Any, new: Any) -> None:
  for alias in aliases:
    module_name, _, name = alias.partition(":")
    module = sys.modules.get(module_name)
    if module is not None and vars(module).get(name) is old:
      setattr(module, name, new)
