"""Compiles functions for GPUs that are not there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import concurrent.futures
import math
from typing import Any

from jax_mgpu_ext._src import errors
from jax_mgpu_ext._src import targets
from jax_mgpu_ext._src.aot import cache as cache_lib
from jax_mgpu_ext._src.aot import compiled
from jax_mgpu_ext._src.aot import compilers
from jax_mgpu_ext._src.aot import lowering
from jax_mgpu_ext._src.aot import toolchain
from jax_mgpu_ext._src.aot.compiled import CompiledKernel
from jax_mgpu_ext._src.targets import Target


def compile_kernel(
    fn: Callable[..., Any],
    *args: Any,
    target: str | Target = "h100",
    sass: bool = True,
    cache: bool = True,
    timeout_s: float = 120.0,
    memory_limit_bytes: int | None = None,
    **kwargs: Any,
) -> CompiledKernel:
  """Compiles a function that calls Mosaic GPU kernels, for a GPU of any kind.

  It is traced in this process, as if the target were there, and compiled in
  another one, which is kept for the next call. No GPU is used, whether there is
  one or not. May be called from several threads.

  Args:
    fn: The function, jitted or not; as it would be called on a GPU.
    *args: Its arguments: arrays, or `jax.ShapeDtypeStruct`.
    target: What to compile for, see `targets.get`.
    sass: Whether the machine code is to be disassembled, too.
    cache: Whether to look into the cache on disk, and to keep the result there.
    timeout_s: How long the compiler may take, in seconds.
    memory_limit_bytes: How much memory the compiler may use, in bytes (Linux
      only); None: as much as there is.
    **kwargs: The function's keyword arguments.

  Raises:
    AotUnavailableError: Something that is needed is not installed.
    TargetError: The target is not known.
    NoKernelError: The function calls no Mosaic GPU kernel.
    SpecError: The target cannot run it; says what and where.
    CompileError: The compiler refused it, crashed (`CompilerCrashError`), took
      too long (`CompileTimeoutError`) or too much memory
      (`CompileMemoryError`); has its last words.
  """
  return compile_with(
      fn, args, kwargs, targets.get(target),
      sass=sass,
      cache=cache,
      timeout_s=timeout_s,
      memory_limit_bytes=memory_limit_bytes,
  )


def compile_for(
    fn: Callable[..., Any],
    *args: Any,
    targets: Sequence[str | Target],  # pylint: disable=redefined-outer-name
    **options: Any,
) -> dict[str, CompiledKernel]:
  """Compiles a function for several targets at a time.

  Args:
    fn: As for `compile_kernel`.
    *args: As for `compile_kernel`.
    targets: What to compile for.
    **options: As for `compile_kernel`.

  Returns:
    Name of the target -> what came out.

  Raises:
    As `compile_kernel`, for the first of the targets that fails.
  """
  if isinstance(targets, (str, Target)):
    targets = (targets,)
  chosen = _distinct(targets)
  if not chosen:
    raise errors.TargetError("expected at least one target, got none")
  with concurrent.futures.ThreadPoolExecutor(len(chosen)) as pool:
    futures = {
        name: pool.submit(compile_kernel, fn, *args, target=target, **options)
        for name, target in chosen.items()
    }
    return {name: future.result() for name, future in futures.items()}


_distinct = targets.distinct


def compile_with(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    target: Target,
    *,
    sass: bool,
    cache: bool,
    timeout_s: float,
    memory_limit_bytes: int | None = None,
    workers: int = 1,
) -> CompiledKernel:
  """As `compile_kernel`, with a number of processes for the target."""
  _check_limits(timeout_s, memory_limit_bytes)
  started_in = compilers.session()
  tools = toolchain.find(sass=sass)
  lowered = lowering.lower(fn, args, kwargs, target)
  name = ""
  if cache:
    name = cache_lib.key(
        lowered.key,
        target=target.to_json(),
        versions=tools.versions,
        sass=sass,
    )
    found = cache_lib.load(name)
    if found is not None:
      try:
        return compiled.from_worker(
            found, target, lowered.resources, cached=True
        )
      except (AttributeError, KeyError, TypeError, ValueError):
        pass  # Of another version of this package: compiled anew.
  event = compilers.compile_module(
      lowered.module,
      target,
      nvdisasm=tools.nvdisasm if sass else None,
      timeout_s=timeout_s,
      memory_limit_bytes=memory_limit_bytes,
      workers=workers,
      started_in=started_in,
  )
  event.pop("event", None)
  if cache:
    cache_lib.store(name, event)
  return compiled.from_worker(event, target, lowered.resources, cached=False)


def _check_limits(timeout_s: Any, memory_limit_bytes: Any) -> None:
  """Checks, before anything is done, that limits are some.

  Raises:
    ValueError: They are none.
  """
  if (
      isinstance(timeout_s, bool)
      or not isinstance(timeout_s, (int, float))
      or not 0 < timeout_s < math.inf
  ):
    raise ValueError(
        f"expected a positive number of seconds, got timeout_s={timeout_s!r}"
    )
  if memory_limit_bytes is not None and (
      type(memory_limit_bytes) is not int  # pylint: disable=unidiomatic-typecheck
      or not 0 < memory_limit_bytes < 2**62
  ):
    raise ValueError(
        "expected a positive number of bytes, or None, got"
        f" memory_limit_bytes={memory_limit_bytes!r}"
    )
