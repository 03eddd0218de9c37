"""Saves what a hook replaces, and puts it back in reverse order.

Both ways can be interrupted at any point: a change is recorded before it is
made, and restoring twice does no harm.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import sys
from typing import Any

from jax_mgpu_ext._src.hooks import contract

_MISSING = object()


@dataclasses.dataclass(frozen=True, eq=False)
class _Entry:
  """One replacement: `owner.name`, and what stood there.

  Attributes:
    owner: A module or a class; for an alias the name of a module, which need
      not have been imported yet.
  """

  owner: Any
  name: str
  is_alias: bool
  original: Any
  value: Any

  def __str__(self) -> str:
    owner = self.owner if self.is_alias else self.owner.__name__
    return f"{owner}.{self.name}"

  def _holder(self) -> Any:
    return sys.modules.get(self.owner) if self.is_alias else self.owner

  def read(self) -> Any:
    return vars(self._holder() or object).get(self.name, _MISSING)

  def write(self, value: Any) -> None:
    if value is _MISSING:
      delattr(self._holder(), self.name)
    else:
      setattr(self._holder(), self.name, value)

  def make(self) -> None:
    if not self.is_alias or self.read() is self.original:
      self.write(self.value)

  def restore(self) -> bool:
    """Puts the original back; returns False if somebody else was there."""
    found = self.read()
    if found is self.value:
      self.write(self.original)
    elif found is not self.original:
      # An alias that is not bound has nothing to be restored.
      return self.is_alias and found is _MISSING
    return True


class Ledger:
  """The replacements of one hook, in the order in which they were made.

  Only to be used under the engine's lock.
  """

  def __init__(self):
    self._entries: list[_Entry] = []

  def __len__(self) -> int:
    return len(self._entries)

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
        yet will bind the replacement by themselves, and are restored too.
    """
    # The raw attribute, not `getattr`: a descriptor bound by `getattr` is not
    # what has to be put back, and an inherited one must not be copied down.
    original = vars(owner).get(name, _MISSING)
    self._make(_Entry(owner, name, False, original, value))
    for alias in aliases:
      module_name, _, alias_name = alias.partition(":")
      self._make(_Entry(module_name, alias_name, True, original, value))

  def _make(self, entry: _Entry) -> None:
    self._entries.append(entry)
    entry.make()

  def replaced(self) -> list[tuple[Any, Any]]:
    """Returns (original, replacement) of every attribute that existed."""
    return [
        (entry.original, entry.value)
        for entry in self._entries
        if not entry.is_alias and entry.original is not _MISSING
    ]

  def rollback(self) -> list[str]:
    """Restores everything, last change first.

    Returns:
      The names of what somebody else has replaced since then. It is left as it
      is, and stays in the ledger for another try.
    """
    foreign = []
    for entry in reversed(self._entries.copy()):
      if entry.restore():
        self._entries.remove(entry)
      else:
        foreign.append(str(entry))
    return foreign
