"""Lowers a function for a target, up to what is handed to the compiler.

This happens in the caller's process, since a function need not be something that
can be sent to another one. Nothing here runs LLVM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import re
from typing import Any

import numpy as np

from jax_mgpu_ext._src import budget
from jax_mgpu_ext._src import budget_kernel
from jax_mgpu_ext._src import errors
from jax_mgpu_ext._src import kernel_calls
from jax_mgpu_ext._src import refusals
from jax_mgpu_ext._src.aot import stand_in
from jax_mgpu_ext._src.aot import toolchain
from jax_mgpu_ext._src.targets import Target

# What Mosaic's kernels are called in the lowered module; later versions of the
# call, should there be some, are as good.
_CUSTOM_CALLS = ("mosaic_gpu_v2", "mosaic_gpu_v3", "mosaic_gpu")
_KERNEL_HASH = re.compile(r'kernel_hash = "((?:[^"\\]|\\.)*)"')
# In bytecode, strings end in a zero.
_KERNEL_NAME = re.compile(rb"\0([\w.$-]+)_mosaic_gpu\0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lowered:
  """A function that was lowered for a target.

  Attributes:
    module: The serialized module (`jax.export`).
    key: The same, without what differs from one lowering of a function to the
      next.
    resources: What each call of `plgpu.kernel` takes, in program order.
  """

  module: bytes
  key: bytes
  resources: tuple[budget.Budget, ...]


def lower(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    target: Target,
) -> Lowered:
  """Traces and lowers a function as if the target were there.

  Args:
    fn: A function, jitted or not.
    args: Its arguments; of arrays only shape and type matter.
    kwargs: Its keyword arguments.
    target: The GPU.

  Raises:
    NoKernelError: It calls no Mosaic GPU kernel.
    SpecError: The target cannot run a kernel of it.
  """
  # pylint: disable=g-import-not-at-top
  import jax
  from jax import export
  # pylint: enable=g-import-not-at-top

  name = getattr(fn, "__name__", type(fn).__name__)
  stages = (jax.stages.Traced, jax.stages.Lowered, jax.stages.Compiled)
  if not callable(fn) or isinstance(fn, stages):
    raise TypeError(
        f"expected a function that calls a kernel, got {type(fn).__name__}: pass"
        " the function itself, and its arguments"
    )
  device = toolchain.device(target.xla_target_config())
  jitted = fn if hasattr(fn, "trace") and hasattr(fn, "lower") else jax.jit(fn)
  args, kwargs = jax.tree.map(_abstract, (tuple(args), dict(kwargs)))
  with stand_in.device(device), _same_from_everywhere():
    try:
      traced = _call(jitted.trace, args, kwargs)
    except TypeError as e:
      # What JAX says of a function that returns a function.
      if re.search(r"returned a value of type .*\bnot a valid JAX type", str(e)):
        raise errors.NoKernelError(
            f"expected a function that returns arrays, got {name}, which returns"
            " something else: if it builds the kernel, call it first and pass"
            " what it returns"
        ) from e
      raise
    # Not all of them: a `pl.pallas_call` gets its body when it is lowered.
    calls = tuple(kernel_calls.find(traced.jaxpr))
    for call in calls:
      refusals.check(call, target)
    make_export = export.export(
        jitted,
        platforms=["cuda"],
        disabled_checks=[
            export.DisabledSafetyCheck.custom_call(name)
            for name in _CUSTOM_CALLS
        ],
    )
    exported = _call(make_export, args, kwargs)
  text = exported.mlir_module()
  if not _KERNEL_HASH.search(text):  # Every kernel has one.
    raise errors.NoKernelError(
        f"expected a function that calls a Mosaic GPU kernel, got {name}, which"
        " calls none: pass the function that calls the kernel, built without"
        " interpret="
    )
  module = bytes(exported.serialize())
  return Lowered(
      module=module,
      key=_without_numbers(module, text),
      resources=tuple(
          budget_kernel.budget_kernel(call, target) for call in calls
      ),
  )


def _without_numbers(module: bytes, text: str) -> bytes:
  """Returns a module without the numbers that Mosaic gives to its kernels.

  It counts the kernels of a process to name their dumps, and in JAX 0.11 that
  number is part of the kernel's hash, too.

  Args:
    module: The serialized module.
    text: The same module as text.
  """
  for escaped in _KERNEL_HASH.findall(text):
    value = re.sub(
        rb"\\([0-9A-F]{2}|.)",
        lambda m: bytes([int(m[1], 16)]) if len(m[1]) == 2 else m[1],
        escaped.encode(),
    )
    module = module.replace(value, b"hash")
  for name in set(_KERNEL_NAME.findall(module)):
    module = re.sub(
        b"\0" + re.escape(name) + rb"_\d+\0", b"\0" + name + b"_0\0", module
    )
  return module


@contextlib.contextmanager
def _same_from_everywhere() -> Iterator[None]:
  """Keeps the caller of `compile_kernel` out of the module.

  JAX puts the whole stack into the locations of operations; the line of the
  kernel is enough. Else the same kernel, compiled from another line, would not be
  found in the cache.
  """
  from jax._src import config  # pylint: disable=g-import-not-at-top

  with config.include_full_tracebacks_in_locations(False):
    yield


# What is called has, as its innermost line outside of JAX, this one, unless it
# has lines of its own.
_call = eval(  # pylint: disable=eval-used
    compile(
        "lambda function, args, kwargs: function(*args, **kwargs)",
        "<compile_kernel>",
        "eval",
    )
)


def _abstract(leaf: Any) -> Any:
  """Returns the type of an array; anything else, as a static argument, as is."""
  import jax  # pylint: disable=g-import-not-at-top

  # A number of NumPy may be a static argument, which must stay what it is.
  if not isinstance(leaf, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)):
    return leaf
  if not isinstance(leaf, jax.ShapeDtypeStruct):
    leaf = jax.eval_shape(lambda array: array, leaf)  # 64 bits may become 32.
  # On the target, wherever the array of the caller is.
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=leaf.weak_type)
