"""Tells the engine when a module of JAX has been imported.

wrapt's post-import hooks run right after a module's own code, before any
importer can bind one of its names. wrapt itself costs more to import than the
rest of this package, so a finder waits for the first Pallas module and loads
wrapt only then: a program that never uses Pallas never pays for it.
"""

from __future__ import annotations

from collections.abc import Iterable
import importlib
import importlib.abc
import sys

_PALLAS = "jax._src.pallas"
_CALLBACK = "jax_mgpu_ext._src.hooks:on_import"

_watched: set[str] = set()


class _PallasSentinel(importlib.abc.MetaPathFinder):
  """Finds nothing; its being asked says that Pallas is about to be imported.

  Any module of Pallas will do, since another thread may have got past the first
  one just before the sentinel was set up.
  """

  def find_spec(self, fullname, path=None, target=None):
    del path, target  # Unused.
    if fullname.startswith(_PALLAS):
      unwatch()
      _register()
    return None


_sentinel = _PallasSentinel()
_registered: set[str] = set()


def watch(modules: Iterable[str]) -> None:
  """Arranges for `hooks.on_import` after each of the modules.

  For modules that are imported already the call comes at once. Watching is
  for good: wrapt cannot forget a hook, the engine decides what to do. Must not
  be called under a lock, since it imports.
  """
  _watched.update(modules)
  if _PALLAS in sys.modules:
    _register()
  elif _sentinel not in sys.meta_path:
    sys.meta_path.insert(0, _sentinel)


def unwatch() -> None:
  """Takes the finder out again, if Pallas has not been imported yet."""
  try:
    sys.meta_path.remove(_sentinel)
  except ValueError:
    pass


def _register() -> None:
  import wrapt  # pylint: disable=g-import-not-at-top

  for name in sorted(_watched - _registered):
    if name in sys.modules:
      # Waits for another thread that is in the middle of importing it: wrapt
      # would take the unfinished module for an imported one.
      importlib.import_module(name)
    wrapt.register_post_import_hook(_CALLBACK, name)
    _registered.add(name)
