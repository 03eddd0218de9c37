"""A cache of what is known about objects, which keeps none of them alive."""

from __future__ import annotations

from typing import Any
import weakref


class _Key(weakref.ref):
  """A weak reference that knows its place in the cache."""

  __slots__ = ("identity", "known")

  def drop(self) -> None:
    known = self.known.get(self.identity)
    if known is not None and known[0] is self:
      del self.known[self.identity]


class IdentityCache:
  """Maps live objects to values.

  By identity, since that costs the least and works for objects that cannot be
  hashed; weak, since an autotuner makes specs without end. Safe in threads:
  each step is one operation on a dict, and two threads that miss at once store
  equal values.

  Attributes:
    known: Identity -> (weak reference, value). For those to whom a method call
      is too much; the identity may be that of an object that is gone, so see
      that the reference leads to the object.
  """

  __slots__ = ("known",)

  def __init__(self):
    self.known: dict[int, tuple[_Key, Any]] = {}

  def get(self, owner: Any) -> Any:
    """Returns the value of an object, or None."""
    known = self.known.get(id(owner))
    if known is not None and known[0]() is owner:
      return known[1]
    return None

  def put(self, owner: Any, value: Any) -> None:
    """Stores the value of an object.

    Raises:
      TypeError: Its type has no room for weak references.
    """
    key = _Key(owner, _Key.drop)
    key.identity = id(owner)
    key.known = self.known
    self.known[key.identity] = (key, value)

  def clear(self) -> None:
    self.known.clear()

  def __len__(self) -> int:
    return len(self.known)
