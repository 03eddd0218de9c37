"""Says where a keyword of `plgpu.kernel` went, or which one was meant.

JAX hands every keyword that it does not know to `Mesh`, and so the error is
about `Mesh.__init__()`.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import sys

from jax_mgpu_ext._src import errors
from jax_mgpu_ext._src import spec_text
from jax_mgpu_ext._src.hooks import contract

# Up to 0.11.1 -> since then.
_MOVED = {"out_shape": "out_type", "scratch_shapes": "scratch_types"}


def _wrap_kernel(original):
  core = sys.modules[contract.MOSAIC_CORE]
  signature = inspect.signature(contract.unwrap(original))
  positional = [
      p for p in signature.parameters.values()
      if p.kind is p.POSITIONAL_OR_KEYWORD
  ]
  known = [
      p.name for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD
  ]
  known += [
      f.name for f in dataclasses.fields(core.Mesh) if f.name not in known
  ]

  @functools.wraps(original)
  def kernel(*args, **kwargs):
    if len(args) > len(positional):
      names = ", ".join(p.name for p in positional)
      raise errors.SpecTypeError(
          f"plgpu.kernel takes by position only {names}, got {len(args)}"
          f" arguments: {spec_text.describe(args[len(positional)])}",
          code="MGPU060",
          hint="Pass the output by name: out_type=...; out_shape became out_type",
      )
    for name in kwargs:
      if name not in known:
        raise _unknown_keyword(name, known)
    if len(positional) > 1:
      args, kwargs = _move_deprecated(args, kwargs)
    return original(*args, **kwargs)

  return kernel


def _move_deprecated(args, kwargs):
  """Renames `out_shape` and `scratch_shapes` where JAX still takes them.

  JAX warns of them, and names the caller by counting frames. With our wrappers
  in between it would name this package, and the default filter, which shows
  deprecations only in the user's own code, would hide the warning.
  """
  given = dict(zip(("body", "out_shape"), args)) | kwargs
  given = {k: v for k, v in given.items() if not contract.is_not_specified(v)}
  old = [name for name in _MOVED if name in given]
  if not old or any(_MOVED[name] in given for name in old):
    return args, kwargs  # Both names at once: JAX says what it thinks of that.
  sys.modules["jax._src.deprecations"].warn(
      "jax-pallas-mgpu-shapes-types",
      "The out_shape and scratch_shapes arguments to plgpu.kernel are"
      " deprecated. Use out_type and scratch_types instead.",
      stacklevel=3,
  )
  for name in old:
    given[_MOVED[name]] = given.pop(name)
  return (), given


def _unknown_keyword(name: str, known: list[str]) -> errors.SpecTypeError:
  if name in _MOVED:
    return errors.SpecTypeError(
        f"plgpu.kernel has no keyword {name!r} any more: it became"
        f" {_MOVED[name]!r}",
        code="MGPU060", hint=f"Write {_MOVED[name]}=...",
    )
  close = difflib.get_close_matches(name, known, n=1)
  hint = f"Did you mean {close[0]!r}? " if close else ""
  return errors.SpecTypeError(
      f"plgpu.kernel has no keyword {name!r}",
      code="MGPU061", hint=f"{hint}It takes {', '.join(known)}",
  )


HOOK = contract.Hook(
    slug="moved_keywords",
    why=(
        "A keyword of plgpu.kernel that was renamed or mistyped is named,"
        " instead of an error about Mesh.__init__()"
    ),
    codes=("MGPU060", "MGPU061"),
    targets=(contract.KERNEL,),
    apply=lambda ledger: ledger.replace(contract.KERNEL, _wrap_kernel),
    native=contract.Target(
        module=contract.MOSAIC_CORE, name="_check_mesh_kwargs"
    ),
)
