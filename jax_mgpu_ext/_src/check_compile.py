"""The stages of a case that ask what it is compiled for: `budget`, `compile`."""

from __future__ import annotations

from collections.abc import Callable
import concurrent.futures
import contextlib
import json
import os
import pathlib
import threading
from typing import Any

import jax

from jax_mgpu_ext._src import budget_kernel
from jax_mgpu_ext._src import check_stages
from jax_mgpu_ext._src import errors
from jax_mgpu_ext._src import kernel_calls
from jax_mgpu_ext._src import refusals
from jax_mgpu_ext._src import targets as targets_lib
from jax_mgpu_ext._src import texts
from jax_mgpu_ext._src.aot import compiled
from jax_mgpu_ext._src.aot import compiling
from jax_mgpu_ext._src.check_cases import KernelCase
from jax_mgpu_ext._src.check_cases import StageFailed
from jax_mgpu_ext._src.check_cases import StageSkipped
from jax_mgpu_ext._src.check_options import file_stem
from jax_mgpu_ext._src.check_options import Options


def budget(case: KernelCase, options: Options) -> dict[str, Any]:
  """The kernel fits into each target, and uses nothing that it does not have."""
  traced = jax.jit(check_stages.make_kernel(case, None)).trace(
      *check_stages.make_inputs(case)
  )
  calls = tuple(kernel_calls.find(traced.jaxpr))
  if not calls:
    raise StageSkipped("it calls no plgpu.kernel")

  def of_target(target: targets_lib.Target) -> dict[str, Any]:
    for call in calls:
      if refused := refusals.refusals(call, target):
        raise refused[0]
    budgets = [budget_kernel.budget_kernel(call, target) for call in calls]
    for found in budgets:
      found.raise_if_over()
    return {"kernels": [one.to_json() for one in budgets]}

  return _for_each(options.targets, of_target)


def compile_case(case: KernelCase, options: Options) -> dict[str, Any]:
  """The compiler accepts the kernel for each target."""
  kernel = check_stages.make_kernel(case, None)
  inputs = check_stages.make_inputs(case)

  def of_target(target: targets_lib.Target) -> dict[str, Any]:
    try:
      code = compiling.compile_kernel(
          kernel,
          *inputs,
          target=target,
          sass=options.sass or "sass" in options.emit,
          cache=options.cache,
      )
    except errors.AotUnavailableError as e:
      raise StageSkipped(texts.text_of(e)) from e
    except errors.NoKernelError as e:
      raise StageSkipped("it calls no Mosaic GPU kernel") from e
    document = code.to_json()
    if options.emit:
      document["files"] = _emit(code, case.name, options)
    return document

  return _for_each(options.targets, of_target)


def _for_each(
    names: tuple[str, ...],
    function: Callable[[targets_lib.Target], dict[str, Any]],
) -> dict[str, Any]:
  """Returns what a function says of each target.

  Raises:
    StageFailed: It failed for some; says for which, and has the data of others.
  """
  targets = [targets_lib.get(name) for name in names]
  if len(targets) > 1:
    with concurrent.futures.ThreadPoolExecutor(len(targets)) as pool:
      outcomes = list(pool.map(lambda t: _outcome(function, t), targets))
  else:
    outcomes = [_outcome(function, target) for target in targets]
  data: dict[str, Any] = {}
  failed: dict[str, Exception] = {}
  for name, outcome in zip(names, outcomes):
    if isinstance(outcome, Exception):
      failed[name] = outcome
      data[name] = {"error": texts.text_of(outcome), "code": outcome.code}
    else:
      data[name] = outcome
  if failed:
    lines = [
        f"{name}: {texts.text_of(error)}" for name, error in failed.items()
    ]
    first, _, rest = lines[0].partition("\n")
    raise StageFailed(
        first, "\n".join(filter(None, [rest, *lines[1:]])), data
    )
  return data


def _outcome(
    function: Callable[[targets_lib.Target], dict[str, Any]],
    target: targets_lib.Target,
) -> dict[str, Any] | Exception:
  """Returns what a function says of a target, or why it refuses it."""
  try:
    return function(target)
  except (errors.SpecError, errors.CompileError) as e:
    return e


def _emit(
    code: compiled.CompiledKernel, name: str, options: Options
) -> list[str]:
  """Writes what was asked for into files; returns their paths.

  Each appears whole or not at all.
  """
  texts: dict[str, str] = {}
  stem = f"{file_stem(name)}.{file_stem(code.target.name)}"
  several = len(code.kernels) > 1
  for number, kernel in enumerate(code.kernels):
    middle = f".{number}" if several else ""
    for kind in ("ptx", "sass", "mlir"):
      if kind in options.emit:
        texts[f"{stem}{middle}.{kind}"] = getattr(kernel, kind)
  if "xla" in options.emit:
    texts[f"{stem}.xla.txt"] = code.xla
  if "resources" in options.emit:
    document = json.dumps(code.to_json(), indent=2)
    texts[f"{stem}.resources.json"] = document + "\n"
  folder = pathlib.Path(options.out)
  paths = []
  for file_name, text in texts.items():
    path = folder / file_name
    part = folder / f".{file_name}.{os.getpid()}-{threading.get_ident()}.part"
    try:
      part.write_text(text, encoding="utf-8")
      part.replace(path)
    except BaseException as e:
      with contextlib.suppress(OSError):
        part.unlink()
      if isinstance(e, OSError):
        raise StageFailed(f"cannot write {str(path)!r}: {e.strerror}") from e
      raise
    paths.append(str(path))
  return paths

