"""Compiles many configurations of a kernel, and tells what fits.

Any `concurrent.futures.Executor` carries the work out: threads, processes, or the
executor of a Dask client on other machines, which must have this package, its
extra `aot`, and the configurations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
import concurrent.futures
import dataclasses
import functools
import os
from typing import Any

from jax_mgpu_ext._src import errors
from jax_mgpu_ext._src import loading
from jax_mgpu_ext._src import programs
from jax_mgpu_ext._src import spec_text
from jax_mgpu_ext._src import targets as targets_lib
from jax_mgpu_ext._src import texts
from jax_mgpu_ext._src.aot import compilers
from jax_mgpu_ext._src.errors import UsageError
from jax_mgpu_ext._src.targets import Target

# What a configuration may be: a function and its arguments, or something that
# makes them.
Config = Any

STATES = ("fits", "spills", "over", "refused")
# What is said of a kernel that another target might take; all else is wrong for
# every one.
_OVER = tuple(f"MGPU{number}" for number in range(101, 109))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepRow:
  """What came of one configuration for one target.

  Attributes:
    config: Its name.
    target: Name of the target.
    state: `fits`; `spills`: it fits, but registers are kept in memory; `over`:
      the target cannot run it; `refused`: the compiler, or JAX, does not take it.
    code: The catalog code of the error, empty if there was none.
    message: What the error says, on one line.
    registers: Registers of a thread.
    spill_bytes: What a thread stores and loads because registers ran out.
    smem_bytes: Dynamic shared memory of a block, in bytes.
    tmem_columns: Columns of tensor memory of a block.
    blocks_per_sm: Blocks that a multiprocessor holds.
    cluster_size: Blocks of a cluster.
    compile_s: How long the compiler took, in seconds, when it was done.
    cached: Whether it came from the cache.
    opcode_classes: Class of instructions -> how many.
  """

  config: str
  target: str
  state: str
  code: str = ""
  message: str = ""
  registers: int | None = None
  spill_bytes: int | None = None
  smem_bytes: int | None = None
  tmem_columns: int | None = None
  blocks_per_sm: int | None = None
  cluster_size: int | None = None
  compile_s: float | None = None
  cached: bool | None = None
  opcode_classes: dict[str, int] = dataclasses.field(default_factory=dict)

  def to_json(self) -> dict[str, Any]:
    return dataclasses.asdict(self)

  @property
  def order(self) -> tuple[Any, ...]:
    """What to sort by: what fits first, and of that what fits best.

    That is, what spills less, then more blocks on a multiprocessor, then fewer
    registers.
    """
    return (
        STATES.index(self.state),
        self.spill_bytes or 0,
        -(self.blocks_per_sm or 0),
        self.registers or 0,
        self.config,
        self.target,
    )


def sweep(
    configs: str | Mapping[Any, Config] | Iterable[Config],
    *,
    targets: Sequence[str | Target] = ("h100",),
    executor: concurrent.futures.Executor | None = None,
    jobs: int | None = None,
    sass: bool = True,
    cache: bool = True,
    timeout_s: float = 120.0,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[SweepRow]:
  """Compiles every configuration for every target.

  A configuration is a pair of a function and the tuple of its arguments, or a
  function of no arguments that returns one; as for `compile_kernel`. What raises
  becomes a row that says so.

  Args:
    configs: Name -> configuration, or a sequence, whose places are the names; or
      `module:object` or `file.py:object` for one that is to be imported
      (wherever the work is carried out), or a function that returns one.
    targets: What to compile for.
    executor: Carries the work out; None: threads of this process. It must be able
      to send the configurations: name them by a string for processes.
    jobs: How many to compile at a time with threads; default: one for each core.
    sass: Whether to disassemble; else instructions are counted in the PTX.
    cache: Whether to use the cache on disk.
    timeout_s: How long the compiler may take for one, in seconds.
    on_progress: Called with the numbers of those done, and of all.

  Returns:
    A row for each, what fits best first.

  Raises:
    UsageError: The configurations cannot be imported.
    TargetError: A target is not known.
    TypeError: They are no configurations.
  """
  if isinstance(targets, (str, Target)):
    targets = (targets,)
  chosen = list(targets_lib.distinct(targets).values())
  named = _named(configs)
  names = list(named)
  if not names:
    raise TypeError("expected at least one configuration, got none")
  jobs = jobs or programs.num_cores()
  own = None
  if executor is None:
    executor = own = concurrent.futures.ThreadPoolExecutor(jobs)
  report = on_progress or (lambda done, total: None)
  options = dict(sass=sass, cache=cache, timeout_s=timeout_s)
  if own is not None:
    options["workers"] = jobs
  futures: list[concurrent.futures.Future[SweepRow]] = []
  try:
    for name in names:
      config = configs if isinstance(configs, str) else named[name]
      for target in chosen:
        futures.append(
            executor.submit(_row, config, name, target.to_json(), options)
        )
    report(0, len(futures))
    for done, _ in enumerate(concurrent.futures.as_completed(futures), 1):
      report(done, len(futures))
    return sorted(
        (future.result() for future in futures), key=lambda row: row.order
    )
  except BaseException:
    for future in futures:
      future.cancel()
    if own is not None:
      compilers.shut_down()  # Else its threads would wait for them.
    raise
  finally:
    if own is not None:
      own.shutdown(cancel_futures=True)


def _named(configs: Any) -> dict[str, Config]:
  """Returns the configurations by their names.

  Raises:
    TypeError: They are no configurations, or two have one name.
  """
  if isinstance(configs, str):
    return _loaded(*_place(configs))
  if callable(configs):
    configs = configs()
  if isinstance(configs, Mapping):
    pairs = [(str(name), config) for name, config in configs.items()]
  elif isinstance(configs, Iterable):
    pairs = [(str(place), config) for place, config in enumerate(configs)]
  else:
    raise TypeError(
        "expected a mapping of names to configurations, or a sequence of them,"
        f" got {type(configs).__name__}"
    )
  named = dict(pairs)
  if len(named) < len(pairs):
    [name, *_] = [n for n, _ in pairs if sum(n == m for m, _ in pairs) > 1]
    raise TypeError(f"two configurations are called {name!r} as a text")
  return named


def _place(source: str) -> tuple[str, int]:
  """Returns where configurations come from, and which edition of it."""
  where, _, name = source.rpartition(":")
  try:
    return f"{os.path.realpath(where)}:{name}", os.stat(where).st_mtime_ns
  except (OSError, ValueError):  # A module; or nothing, as is said later.
    return source, 0


@functools.lru_cache(maxsize=8)
def _loaded(source: str, unused_edition: int) -> dict[str, Config]:
  """Imports configurations.

  Raises:
    UsageError: There are none, or their own code fails.
  """
  found = loading.load_object(source)
  try:
    return _named(found)
  except TypeError as e:
    if callable(found):
      raise UsageError(f"{source!r} failed: {loading.describe(e)}") from e
    raise
  except (KeyboardInterrupt, UsageError):
    raise
  except BaseException as e:  # SystemExit, too. pylint: disable=broad-exception-caught
    raise UsageError(f"{source!r} failed: {loading.describe(e)}") from e


def _row(
    config: Config, name: str, target: dict[str, Any], options: dict[str, Any]
) -> SweepRow:
  """Compiles one configuration; runs wherever the executor does."""
  from jax_mgpu_ext._src.aot import compiling  # pylint: disable=g-import-not-at-top

  gpu = targets_lib.from_json(target)
  row = functools.partial(SweepRow, config=name, target=gpu.name)
  try:
    if isinstance(config, str):
      config = _named(config)[name]  # Imported once a process.
    if callable(config):
      config = config()
    if not (
        isinstance(config, (tuple, list)) and len(config) == 2
        and callable(config[0]) and isinstance(config[1], (tuple, list))
    ):
      raise TypeError(
          "expected a pair (function, (arguments, ...)), or a function that"
          f" returns one, got {spec_text.describe(config)}"
      )
    code = compiling.compile_with(config[0], config[1], {}, gpu, **options)
    return row(
        state="spills" if code.spill_bytes else "fits",
        registers=code.registers,
        spill_bytes=code.spill_bytes,
        smem_bytes=code.smem_bytes,
        tmem_columns=code.tmem_columns,
        blocks_per_sm=code.blocks_per_sm,
        cluster_size=code.cluster_size,
        compile_s=code.compile_s,
        cached=code.cached,
        opcode_classes=code.class_counts(),
    )
  except (errors.AotUnavailableError, KeyboardInterrupt):
    raise  # The first is the same for all of them.
  except BaseException as e:  # SystemExit, too. pylint: disable=broad-exception-caught
    code = getattr(e, "code", "")
    code = code if isinstance(code, str) else ""
    text = errors.one_line(texts.text_of(e), 400)
    return row(
        state="over" if code in _OVER else "refused",
        code=code,
        message=text if code else f"{type(e).__name__}: {text}",
    )
