"""Keeps what was compiled on disk, by what it was compiled from.

An entry is one file, whose name is the hash of everything that decides on its
content: the lowered module, the target, and the versions of the compiler. It
begins with the hash of the rest, so that a damaged one is noticed, and removed.
It is written to one side and moved into place in one step: two processes that
compile the same kernel write the same entry, and none is ever seen half written.
"""

from __future__ import annotations

from collections.abc import Mapping
import contextlib
import hashlib
import json
import os
import pathlib
import tempfile
import time
from typing import Any
import warnings
import zlib

from jax_mgpu_ext._src import config
from jax_mgpu_ext._src import errors

# Part of every key: an entry of another layout is not found.
_LAYOUT = 1
_SUFFIX = ".mgpu"
_MAGIC = b"jax-mgpu-ext compiled kernel\n"
_DIGEST_BYTES = 32
# The least recently used entries go when there is more than this.
MAX_BYTES = 1 << 30

# Looking through all of them takes a while.
_SWEEP_EVERY = 50
_stores: dict[pathlib.Path, int] = {}
# Of a process that was killed, if it is older, in seconds.
_OLD_PART_S = 3600.0


def folder() -> pathlib.Path:
  """Returns where entries are kept.

  That is the environment's `JAX_MGPU_EXT_CACHE_DIR`, or `jax-mgpu-ext` in the
  user's folder for caches.
  """
  if named := config.cache_dir():
    return pathlib.Path(named)
  import platformdirs  # pylint: disable=g-import-not-at-top

  return pathlib.Path(platformdirs.user_cache_dir("jax-mgpu-ext")) / "compiled"


def key(module: bytes, **parts: Any) -> str:
  """Returns the name of an entry.

  Args:
    module: The lowered module.
    **parts: Everything else that decides on what comes out, as JSON.
  """
  text = json.dumps({"layout": _LAYOUT, **parts}, sort_keys=True)
  digest = hashlib.sha256(text.encode())
  digest.update(b"\n")
  digest.update(module)
  return digest.hexdigest()


def load(name: str) -> dict[str, Any] | None:
  """Returns an entry, None if there is no sound one of that name."""
  try:
    path = folder() / (name + _SUFFIX)
    data = path.read_bytes()
  except (OSError, RuntimeError):  # Also where nobody has a home.
    return None
  document = _decode(name, data)
  if document is None:
    with contextlib.suppress(OSError):
      path.unlink()
    return None
  with contextlib.suppress(OSError):
    os.utime(path)  # It was used.
  return document


def _decode(name: str, data: bytes) -> dict[str, Any] | None:
  start = len(_MAGIC) + _DIGEST_BYTES
  if not data.startswith(_MAGIC):
    return None
  body = data[start:]
  if hashlib.sha256(body).digest() != data[len(_MAGIC) : start]:
    return None
  try:
    document = json.loads(zlib.decompress(body))
    return document["value"] if document["name"] == name else None
  except (KeyError, TypeError, ValueError, RecursionError, zlib.error):
    return None  # The hash is right, yet it is not ours.


def store(name: str, value: Mapping[str, Any]) -> None:
  """Keeps an entry; warns, once, if it cannot be written."""
  body = zlib.compress(
      json.dumps({"name": name, "value": value}).encode(), level=1
  )
  target, part = None, None
  try:
    target = folder()
    target.mkdir(parents=True, exist_ok=True)
    handle, part = tempfile.mkstemp(dir=target, suffix=".part")
    with os.fdopen(handle, "wb") as file:
      file.write(_MAGIC + hashlib.sha256(body).digest() + body)
    os.replace(part, target / (name + _SUFFIX))
    part = None
    _sweep(target)
  except (OSError, RuntimeError) as e:
    warnings.warn(
        errors.CompileCacheWarning(
            f"cannot keep compiled kernels in {str(target)!r}:"
            f" {getattr(e, 'strerror', None) or e}. Name another folder in"
            f" {config.CACHE_DIR_VARIABLE}, or pass cache=False"
        ),
        stacklevel=2,
    )
  finally:
    if part is not None:
      with contextlib.suppress(OSError):
        os.unlink(part)


def _sweep(target: pathlib.Path) -> None:
  """Removes what has not been used for longest, once in so many stores."""
  _stores[target] = _stores.get(target, 0) + 1
  if _stores[target] % _SWEEP_EVERY != 1:
    return
  found = []
  for path in target.iterdir():
    if path.suffix in (_SUFFIX, ".part"):
      with contextlib.suppress(OSError):  # Somebody else removed it.
        status = path.stat()
        found.append((status.st_mtime, status.st_size, path))
  total = sum(size for _, size, _ in found)
  for _, size, path in sorted(found):
    if total <= MAX_BYTES:
      break
    with contextlib.suppress(OSError):
      path.unlink()
      total -= size


def clear() -> int:
  """Removes all entries; returns how many there were."""
  count = 0
  target = folder()
  if not target.is_dir():
    return 0
  for path in target.iterdir():
    with contextlib.suppress(OSError):  # Somebody else removed it.
      # Somebody may be writing the younger parts.
      old = time.time() - path.stat().st_mtime > _OLD_PART_S
      if path.suffix == _SUFFIX or (path.suffix == ".part" and old):
        path.unlink()
        count += path.suffix == _SUFFIX
  return count
