"""Decides whether a hook fits the JAX that is installed.

The decision is by content: every target has a fingerprint of its source in
each supported release (`releases.py`), and a hook is applied only to targets
that it knows.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import hashlib
import inspect
import textwrap
from typing import Any

from jax_mgpu_ext._src import releases
from jax_mgpu_ext._src.hooks import contract

NO_SOURCE = "no source"


def fingerprint(function: Any) -> str:
  """Returns the first 16 hex digits of the hash of a function's syntax tree.

  Comments, layout and docstrings do not count, and the result is the same on
  every Python version. `absent` for None, `no source` for what has none.
  """
  if function is None:
    return contract.ABSENT
  function = getattr(function, "__func__", function)
  code = getattr(function, "__code__", None)
  if code is not None and code.co_filename == contextlib.__file__:
    # What `contextlib.contextmanager` returns is the same for all.
    code = getattr(function.__wrapped__, "__code__", None)
  if code is None:
    return NO_SOURCE
  try:
    # Of the code object, not of the function: `inspect` would follow
    # `__wrapped__` and so miss a wrapper that somebody has put around it.
    source = textwrap.dedent(inspect.getsource(code))
    tree = ast.parse(source)
  except (OSError, TypeError, SyntaxError):
    return NO_SOURCE
  return hashlib.sha256(_canonical(tree).encode()).hexdigest()[:16]


def _canonical(node: Any) -> str:
  """Writes a syntax tree as text, without what differs between Pythons."""
  if isinstance(node, list):
    return f"[{','.join(map(_canonical, node))}]"
  if not isinstance(node, ast.AST):
    return repr(node)
  body = getattr(node, "body", None)
  if isinstance(body, list) and body and _is_docstring(body[0]):
    node.body = body[1:]
  fields = (
      f"{name}={_canonical(value)}"
      for name, value in ast.iter_fields(node)
      # Empty fields come and go with the version (`type_params`, `kind`).
      if value is not None and value != []
  )
  return f"{type(node).__name__}({','.join(fields)})"


def _is_docstring(node: ast.AST) -> bool:
  return (
      isinstance(node, ast.Expr)
      and isinstance(node.value, ast.Constant)
      and isinstance(node.value.value, str)
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
  """The guard's answer about one hook.

  Attributes:
    state: `fits`, `refused`, `in tree` or `not needed`.
    required: What the hook wants.
    found: What is there.
    reason: Why, in words; empty where nothing is to be said.
  """

  state: str
  required: str
  found: str
  reason: str = ""


def of_release(hook: contract.Hook, version: str) -> Verdict | None:
  """Returns the verdict that the release alone decides, or None.

  Args:
    hook: The hook; its modules need not be imported.
    version: The version of JAX that is running.
  """
  running = f"JAX {version}"
  if hook.since and releases.key(version) < releases.key(hook.since):
    return Verdict(
        state="not needed",
        required=f"JAX {hook.since} or later",
        found=running,
        reason=hook.before or "this release does not have what the hook changes",
    )
  if hook.until and releases.key(version) >= releases.key(hook.until):
    return Verdict(
        state="not needed",
        required=f"JAX before {hook.until}",
        found=running,
        reason="this release is right without the hook",
    )
  return None


def judge(
    hook: contract.Hook, version: str, originals: dict[str, Any]
) -> Verdict:
  """Compares the targets of a hook with the fingerprints that are known.

  Args:
    hook: The hook; all modules of its targets are imported.
    version: The version of JAX that is running.
    originals: What stood at targets that another hook has replaced already.
  """
  required = f"JAX {', '.join(releases.SUPPORTED)} or the same sources"
  running = f"JAX {version}"
  if (verdict := of_release(hook, version)) is not None:
    return verdict
  if hook.native is not None and hook.native.current() is not None:
    return Verdict(
        state="in tree",
        required=f"JAX without {hook.native}",
        found=f"{running} with {hook.native}",
        reason="the running JAX makes this change itself",
    )
  prints = {
      str(target): fingerprint(
          originals.get(str(target), target.current())
      )
      for target in hook.targets
      if target.owner() is not None or not target.optional
  }
  unknown = [
      t for t in prints if prints[t] not in releases.FINGERPRINTS.get(t, {})
  ]
  if unknown:
    return Verdict(
        state="refused",
        required=required,
        found=", ".join(f"{t} is {prints[t]}" for t in unknown),
        reason=(
            "JAX's sources differ from every release that this hook was"
            " tested with"
        ),
    )
  reason = ""
  if releases.canonical(version) not in releases.SUPPORTED:
    reason = f"JAX {version} is not a tested release, but its sources are known"
  return Verdict(
      state="fits", required=required, found=running, reason=reason
  )
