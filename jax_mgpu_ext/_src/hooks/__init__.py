"""The engine: which hooks there are, and which of them are in force.

A hook is applied once every module that it changes has been imported, if the
guard lets it. See `docs/hooks.md`.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import dataclasses
import importlib
import logging
import sys
import threading
import types
from typing import Any
import warnings

from jax_mgpu_ext._src import config
from jax_mgpu_ext._src import errors
from jax_mgpu_ext._src.hooks import contract
from jax_mgpu_ext._src.hooks import guard
from jax_mgpu_ext._src.hooks import import_hook
from jax_mgpu_ext._src.hooks import ledger as ledger_lib

# In the order in which they are applied. Where two change the same function,
# the later one is the outer one.
SLUGS = (
    "aval_dispatch",
    "array_avals",
    "scratch_trees",
    "barrier_constructors",
    "barrier_indices",
    "ref_unions",
    "transforms",
    "cluster_axes",
    "moved_keywords",
)

# The modules whose import makes the engine look again: all that hooks change.
# Written down here, so that activation loads no hook module before it must.
TRIGGERS = (
    "jax._src.pallas.core",
    "jax._src.pallas.mosaic_gpu.core",
    "jax._src.pallas.mosaic_gpu.lowering",
    "jax._src.pallas.mpmd",
    "jax._src.pallas.pallas_call",
    "jax._src.pallas.primitives",
    "jax._src.state.types",
)

STATES = (
    "applied", "pending", "disabled", "refused", "failed", "in tree",
    "not needed", "off",
)

_logger = logging.getLogger("jax_mgpu_ext")
# Re-entrant, since wrapt calls back at once for modules that are there already.
# Nothing is imported under it, so it cannot deadlock with an import lock.
_lock = threading.RLock()


@dataclasses.dataclass(frozen=True, kw_only=True)
class HookStatus:
  """The state of one hook.

  Attributes:
    slug: The hook's name.
    state: `applied`; `pending`: waits for modules to be imported; `disabled`
      by the environment; `refused` by the guard; `failed`: its `apply` raised
      and was rolled back; `in tree`: JAX makes the change itself; `not needed`
      in this release; `off`: not activated.
    required: What the hook wants, empty while it is pending or off.
    found: What was there.
    reason: Why, in words.
  """

  slug: str
  state: str
  required: str = ""
  found: str = ""
  reason: str = ""


@dataclasses.dataclass
class _Engine:
  """What is in force. Protected by `_lock`."""

  active: bool = False
  settings: config.Settings = dataclasses.field(default_factory=config.Settings)
  statuses: dict[str, HookStatus] = dataclasses.field(default_factory=dict)
  # In the order of application, which undoing reverses.
  ledgers: dict[str, ledger_lib.Ledger] = dataclasses.field(
      default_factory=dict
  )
  # Target -> what JAX had there, for every target of an applied hook.
  originals: dict[str, Any] = dataclasses.field(default_factory=dict)


_engine = _Engine()
# Modules that have run to their end, as wrapt told us.
_imported: set[str] = set()


def load(slug: str) -> contract.Hook:
  """Returns the hook that a module declares.

  Raises:
    ValueError: There is no such slug.
  """
  if slug not in SLUGS:
    raise ValueError(
        f"expected a hook slug, got {slug!r}; the hooks are {', '.join(SLUGS)}"
    )
  return importlib.import_module(f"{__name__}.{slug}").HOOK


def activate() -> None:
  """Applies the hooks, now or when JAX's modules are imported.

  Calling it again changes nothing. Safe in any thread.

  Raises:
    ConfigError: An environment variable has an illegal value.
    HookRefusedError: Under `JAX_MGPU_EXT=strict`, a hook does not fit the JAX
      that is imported; nothing stays applied.
  """
  settings = config.settings(SLUGS)
  # Before the lock is taken, since both import.
  import_hook.watch(TRIGGERS)
  if contract.MOSAIC_CORE in _imported:
    _preload()
  with _lock:
    if _engine.active:
      return
    _engine.active = True
    _engine.settings = settings
    for slug in SLUGS:
      state, reason = "pending", "waits for Pallas Mosaic GPU to be imported"
      if slug in settings.disabled:
        state, reason = "disabled", f"named in {config.DISABLE_VARIABLE}"
      _engine.statuses[slug] = HookStatus(slug=slug, state=state, reason=reason)
    _apply_pending()
    replaced = [
        pair for ledger in _engine.ledgers.values() for pair in ledger.replaced()
    ]
  _warn_of_stale(replaced, "activated")


def deactivate() -> None:
  """Puts everything back as JAX made it. Calling it again changes nothing."""
  import_hook.unwatch()
  with _lock:
    replaced = _undo()
  _warn_of_stale(replaced, "deactivated")


def _undo() -> list[tuple[Any, Any]]:
  """Rolls every hook back, the last one first; returns (ours, JAX's) pairs."""
  replaced = []
  for ledger in reversed(list(_engine.ledgers.values())):
    replaced += [(new, old) for old, new in ledger.replaced()]
    ledger.rollback()
  _engine.active = False
  _engine.ledgers.clear()
  _engine.originals.clear()
  _engine.statuses.clear()
  return replaced


@contextlib.contextmanager
def activated() -> Iterator[None]:
  """Activates the hooks for a `with` block; leaves them if they were active."""
  was_active = _engine.active
  activate()
  try:
    yield
  finally:
    if not was_active:
      deactivate()


def is_active() -> bool:
  """Returns whether the hooks are activated."""
  return _engine.active


def status() -> list[HookStatus]:
  """Returns the state of every hook, in the order of application."""
  with _lock:
    return [
        _engine.statuses.get(slug)
        or HookStatus(slug=slug, state="off", reason="not activated")
        for slug in SLUGS
    ]


def get_original(target: str | Any) -> Any:
  """Returns what JAX had at a target before any hook.

  Args:
    target: `module:name` or `module.name`, or an object that may be one of our
      replacements.

  Returns:
    JAX's own object; where nothing was replaced, the present one.

  Raises:
    AttributeError: A name was given and there is nothing of that name.
  """
  with _lock:
    if not isinstance(target, str):
      for ledger in reversed(list(_engine.ledgers.values())):
        for original, value in reversed(ledger.replaced()):
          if value is target:
            target = original
      return target
    for name, original in _engine.originals.items():
      if target in (name, name.replace(":", ".")) and original is not None:
        return original
  return _resolve(target)


def on_import(module: types.ModuleType) -> None:
  """Called by wrapt when one of `TRIGGERS` has been imported."""
  _imported.add(module.__name__)
  if not _engine.active or contract.MOSAIC_CORE not in _imported:
    return
  _preload()
  with _lock:
    if _engine.active:
      _apply_pending()


def _preload() -> None:
  """Imports the hook modules, which must not happen under `_lock`.

  Another thread may be importing this package, and wait for `_lock` while it
  holds the import lock that these imports need.
  """
  for slug in SLUGS:
    load(slug)


def _apply_pending() -> None:
  """Applies, in order, the hooks whose modules are there; all or none."""
  if contract.MOSAIC_CORE not in _imported:
    return
  try:
    for slug in SLUGS:
      if _engine.statuses[slug].state == "pending":
        hook = load(slug)
        if not hook.modules <= _imported:
          # The later ones wait too, so that the order is always the same,
          # whatever was imported when.
          break
        _engine.statuses[slug] = _apply(hook)
  except BaseException:  # Strict mode, or Ctrl-C.
    _undo()
    raise


def _apply(hook: contract.Hook) -> HookStatus:
  version = sys.modules["jax.version"].__version__
  verdict = guard.judge(hook, version, _engine.originals)
  found = dataclasses.asdict(verdict)
  state = found.pop("state")
  if state == "refused":
    if _engine.settings.mode == "strict":
      raise errors.HookRefusedError(
          f"Hook {hook.slug} needs {verdict.required}, but {verdict.found}."
          f" Install a supported JAX, name the hook in"
          f" {config.DISABLE_VARIABLE}, or set {config.MODE_VARIABLE}=on to"
          f" go on without it [{errors.HookRefusedError.code}]"
      )
    _logger.warning(
        "hook %s refused: %s (%s)", hook.slug, verdict.reason, verdict.found
    )
  if state != "fits":
    return HookStatus(slug=hook.slug, state=state, **found)
  if verdict.reason:
    _log_once(verdict.reason)
  _hide_frames()
  originals = {str(t): t.current() for t in hook.targets}
  ledger = ledger_lib.Ledger()
  try:
    hook.apply(ledger)
  except Exception as e:  # pylint: disable=broad-exception-caught
    ledger.rollback()
    if _engine.settings.mode == "strict":
      raise
    _logger.warning("hook %s failed and was undone", hook.slug, exc_info=True)
    found["reason"] = f"{type(e).__name__}: {e}"
    return HookStatus(slug=hook.slug, state="failed", **found)
  _engine.ledgers[hook.slug] = ledger
  for target, original in originals.items():
    _engine.originals.setdefault(target, original)
  return HookStatus(slug=hook.slug, state="applied", **found)


_logged: set[str] = set()


def _log_once(text: str) -> None:
  if text not in _logged:
    _logged.add(text)
    _logger.info("%s; hooks applied", text)


def _hide_frames() -> None:
  """Makes JAX skip our frames, as its own, in tracebacks and source lines.

  Without it the source information in a lowered module would change.
  """
  directory = __file__.removesuffix("hooks/__init__.py")
  for name in ("jax._src.traceback_util", "jax._src.source_info_util"):
    module = sys.modules[name]
    if directory not in module._exclude_paths:  # pylint: disable=protected-access
      module.register_exclusion(directory)


def _resolve(target: str) -> Any:
  module_name, colon, name = target.partition(":")
  if not colon:
    module_name = target
    while module_name and module_name not in sys.modules:
      module_name = module_name.rpartition(".")[0]
    name = target.removeprefix(f"{module_name}.")
  found = sys.modules.get(module_name)
  for part in name.split("."):
    found = getattr(found, part, None)
  if found is None:
    raise AttributeError(
        f"expected module:name of something that is imported, got {target!r}"
    )
  return found


def _warn_of_stale(replaced: list[tuple[Any, Any]], verb: str) -> None:
  """Names the modules that bound an object before it was replaced."""
  functions = {
      id(old): getattr(old, "__name__", "")
      for old, _ in replaced
      if isinstance(old, types.FunctionType)
  }
  if not functions:
    return
  holders = []
  for module_name, module in sorted(sys.modules.copy().items()):
    if not isinstance(module, types.ModuleType) or module_name == __name__:
      continue
    if module_name.startswith("jax_mgpu_ext."):
      continue
    for name, value in list(vars(module).items()):
      if id(value) in functions:
        holders.append(f"{module_name}.{name}")
  if holders:
    warnings.warn(
        f"jax_mgpu_ext was {verb} after these names were bound, and they still"
        f" hold the old objects: {', '.join(holders)}. Import jax_mgpu_ext"
        " before the modules that use Pallas [MGPU092]",
        errors.LateActivationWarning,
        stacklevel=3,
    )
