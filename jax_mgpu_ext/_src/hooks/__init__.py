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

from jax_mgpu_ext._src import config
from jax_mgpu_ext._src import errors
from jax_mgpu_ext._src.hooks import contract
from jax_mgpu_ext._src.hooks import guard
from jax_mgpu_ext._src.hooks import import_hook
from jax_mgpu_ext._src.hooks import late
from jax_mgpu_ext._src.hooks import ledger as ledger_lib

# In the order in which they are applied. Where two change the same function,
# the later one is the outer one.
SLUGS = (
    "aval_dispatch", "array_avals", "scratch_trees", "barrier_constructors",
    "barrier_indices", "ref_unions", "transforms", "cluster_axes",
    "moved_keywords", "grid_trace_key", "interpret_deadlock",
)

# The modules whose import makes the engine look again: all that hooks change. Here,
# so that activation loads no hook module before it must.
TRIGGERS = (
    "jax._src.pallas.core",
    "jax._src.pallas.mosaic.interpret.thread_map",
    "jax._src.pallas.mosaic_gpu.core",
    "jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks",
    "jax._src.pallas.mosaic_gpu.interpret.jaxpr_interpret",
    "jax._src.pallas.mosaic_gpu.interpret.shared_memory",
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
  # How many `activated()` blocks keep it active; 0 if `activate()` did it.
  blocks: int = 0
  settings: config.Settings = dataclasses.field(default_factory=config.Settings)
  statuses: dict[str, HookStatus] = dataclasses.field(default_factory=dict)
  # In the order of application, which undoing reverses.
  ledgers: dict[str, ledger_lib.Ledger] = dataclasses.field(
      default_factory=dict
  )
  # What could not be put back, since somebody else has replaced it.
  leftovers: list[ledger_lib.Ledger] = dataclasses.field(default_factory=list)
  # Target -> what JAX had there, for every target of an applied hook.
  originals: dict[str, Any] = dataclasses.field(default_factory=dict)


_engine = _Engine()
# Modules that have run to their end, as wrapt told us.
_imported: dict[str, types.ModuleType] = {}


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

  Calling it again changes nothing. Safe in any thread. If it raises, be it by
  Ctrl-C or by a warning that is an error, nothing stays applied.

  Raises:
    ConfigError: An environment variable has an illegal value.
    HookRefusedError: Under `JAX_MGPU_EXT=strict`, a hook does not fit the JAX
      that is imported.
  """
  _activate(is_block=False)


def _activate(is_block: bool) -> None:
  settings = config.settings(SLUGS)
  # Before the lock is taken, since both import.
  import_hook.watch(TRIGGERS)
  if _is_complete(contract.MOSAIC_CORE):
    _preload()
  replaced = []
  is_first = False
  try:
    with _lock:
      is_first = not _engine.active
      is_counted = is_block and (is_first or _engine.blocks)
      if is_first:
        _undo()  # What an interrupt, or somebody else's patch, has left.
        _engine.active = True
        _engine.settings = settings
        for slug in SLUGS:
          _engine.statuses[slug] = _initial_status(slug, settings)
      if is_counted:
        _engine.blocks += 1
      elif not is_block:
        _engine.blocks = 0  # From now on it stays, whatever block ends.
      fresh = not _engine.ledgers
      _apply_pending()
      if fresh:
        for ledger in _engine.ledgers.values():
          replaced += ledger.replaced()
    if is_first:
      # Again, since a deactivation in another thread may have stopped the
      # watch after it was begun above.
      import_hook.watch(TRIGGERS)
    late.warn_of_stale(replaced, "activated")
  except BaseException:
    if is_first:  # Otherwise it was active before, and stays so.
      with _lock:
        _undo()
    raise


def _initial_status(slug: str, settings: config.Settings) -> HookStatus:
  if slug in settings.disabled:
    reason = f"named in {config.DISABLE_VARIABLE}"
    return HookStatus(slug=slug, state="disabled", reason=reason)
  reason = "waits for what it changes to be imported"
  return HookStatus(slug=slug, state="pending", reason=reason)


def deactivate() -> None:
  """Puts everything back as JAX made it. Calling it again changes nothing.

  What somebody else has replaced since then is left as it is, with a
  `ForeignPatchWarning` that names it; call it again when that is undone.
  """
  _deactivate(is_block=False)


def _deactivate(is_block: bool) -> None:
  with _lock:
    # A block that begins in another thread must see either the count that this
    # one still is part of, or inactive hooks, and never what lies between.
    if is_block and _engine.blocks != 1:
      if _engine.blocks:
        _engine.blocks -= 1
      return
    import_hook.unwatch()
    replaced, foreign = _undo()
  late.warn_of_foreign(foreign)
  late.warn_of_stale(replaced, "deactivated")


def _undo() -> tuple[list[tuple[Any, Any]], list[str]]:
  """Rolls every hook back, the last one first.

  Returns:
    Pairs (ours, JAX's) of what was put back, and the names of what could not.
  """
  try:
    return _undo_once()
  except KeyboardInterrupt:
    _undo()  # JAX must not be left half changed; the interrupt comes after.
    raise


def _undo_once() -> tuple[list[tuple[Any, Any]], list[str]]:
  ledgers = [*_engine.leftovers, *_engine.ledgers.values()]
  replaced = [
      (new, old) for ledger in ledgers for old, new in ledger.replaced()
  ]
  foreign = []
  for ledger in reversed(ledgers):
    foreign += ledger.rollback()
  _engine.leftovers = [ledger for ledger in ledgers if len(ledger)]
  _engine.ledgers.clear()
  _engine.active = False
  _engine.blocks = 0
  _engine.originals.clear()
  _engine.statuses.clear()
  return replaced, foreign


@contextlib.contextmanager
def activated() -> Iterator[None]:
  """Activates the hooks for a `with` block; leaves them if they were active.

  Blocks may overlap, also in several threads: the last one that ends
  deactivates what the first one activated.
  """
  _activate(is_block=True)
  try:
    yield
  finally:
    _deactivate(is_block=True)


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
  return contract.resolve(target)


def on_import(module: types.ModuleType) -> None:
  """Called by wrapt when one of `TRIGGERS` has been imported."""
  _imported[module.__name__] = module
  if not _engine.active or not _is_complete(contract.MOSAIC_CORE):
    return
  _preload()
  with _lock:
    if _engine.active:
      _apply_pending()


def _is_complete(name: str) -> bool:
  """Returns whether a module has been imported to its end."""
  module = sys.modules.get(name)
  if module is None:
    return False
  # While wrapt calls us, Python still counts the module as being imported.
  return _imported.get(name) is module or not getattr(
      module.__spec__, "_initializing", False
  )


def _preload() -> None:
  """Imports the hook modules, which must not happen under `_lock`.

  Another thread may be importing this package, and wait for `_lock` while it
  holds the import lock that these imports need.
  """
  for slug in SLUGS:
    load(slug)


def _apply_pending() -> None:
  """Applies, in order, the hooks whose modules are there; all or none."""
  if not _is_complete(contract.MOSAIC_CORE):
    return
  try:
    for slug in SLUGS:
      if _engine.statuses[slug].state == "pending":
        hook = load(slug)
        version = sys.modules["jax.version"].__version__
        if not all(map(_is_complete, hook.modules)) and (
            guard.of_release(hook, version) is None
        ):
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
  for target in hook.targets:
    _engine.originals.setdefault(str(target), target.current())
  # Known before it is used, so that an interrupt can be undone.
  ledger = _engine.ledgers[hook.slug] = ledger_lib.Ledger()
  try:
    hook.apply(ledger)
  except Exception as e:  # pylint: disable=broad-exception-caught
    ledger.rollback()
    if _engine.settings.mode == "strict":
      raise
    _logger.warning("hook %s failed and was undone", hook.slug, exc_info=True)
    found["reason"] = f"{type(e).__name__}: {e}"
    return HookStatus(slug=hook.slug, state="failed", **found)
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
