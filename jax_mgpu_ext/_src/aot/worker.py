"""The child process that compiles for one target.

The first target that a process compiles for decides what the compiler takes for
the machine's GPU, so it serves one for all its life. LLVM ends the process on
what it cannot compile; the parent sees that.

Requests, from the parent:
  {"do": "start", "config": ..., "folder": ...}        once, first
  {"do": "compile", "module": PATH, "nvdisasm": PATH or null, "memory_bytes": ...}
Events:
  {"event": "ready"}
  {"event": "begun"}, then one of
  {"event": "compiled", ...}   see `_compile`
  {"event": "stale"}           it knows a kernel already, and Mosaic, which keeps
                               kernels by their hash, would say nothing about it
  {"event": "failed", "kind": ..., "message": ...}
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import queue
import re
import shlex
import shutil
import subprocess
import time
from typing import Any

from jax_mgpu_ext._src import child_server
from jax_mgpu_ext._src.aot import dumps

# A worker that nobody wants ends by itself, in seconds.
_IDLE_S = 300.0

# Mosaic calls this in the place of the disassembler, which gives us the binary
# itself, and clears away the folder that Mosaic leaves behind.
_KEEP_BINARY = """\
#!/bin/sh
PATH="$PATH:/usr/bin:/bin"
for argument; do
  if [ -f "$argument" ]; then
    mv "$argument" "$(mktemp {folder}/XXXXXX)"
    rmdir "${{argument%/*}}"
  fi
done
"""

_KERNEL_HASH = re.compile(r'kernel_hash = "((?:[^"\\]|\\.)*)"')


class _Worker(child_server.Server):

  def __init__(self, request_fd: int, event_fd: int):
    super().__init__(request_fd, event_fd)
    self._device: Any = None
    self._folder = pathlib.Path()
    self._known: set[str] = set()

  def next_request(self) -> dict[str, Any]:
    try:
      return self._requests.get(timeout=_IDLE_S)
    except queue.Empty:
      os._exit(0)

  def carry_out(self, request: dict[str, Any]) -> None:
    if request["do"] == "start":
      self._start(request["config"], request["folder"])
    else:
      self._run(request)

  def _start(self, config: str, folder: str) -> None:
    from jax.experimental.pallas import mosaic_gpu  # pylint: disable=unused-import,g-import-not-at-top
    from jax_mgpu_ext._src.aot import toolchain  # pylint: disable=g-import-not-at-top

    self._folder = pathlib.Path(folder)
    programs = self._folder / "cuda" / "bin"
    programs.mkdir(parents=True)
    (self._folder / "binaries").mkdir()
    script = programs / "nvdisasm"
    script.write_text(
        _KEEP_BINARY.format(folder=shlex.quote(str(self._folder / "binaries"))),
        encoding="utf-8",
    )
    script.chmod(0o700)
    # Where Mosaic, which has set it by now, looks for the disassembler.
    os.environ["MOSAIC_GPU_CUDA_ROOT"] = str(programs.parent)
    # XLA takes the first assembler that it finds.
    if (ptxas := toolchain.ptxas()) is not None:
      path = os.environ.get("PATH", "")
      os.environ["PATH"] = os.pathsep.join([os.path.dirname(ptxas), path])
    self._device = toolchain.device(config)
    self.send("ready")

  def _run(self, request: dict[str, Any]) -> None:
    self.send("begun")
    try:
      result = self._compile(
          pathlib.Path(request["module"]).read_bytes(),
          request["nvdisasm"],
          request["memory_bytes"],
      )
    except MemoryError as e:
      self.send("failed", kind="memory", message=str(e))
    except Exception as e:  # pylint: disable=broad-exception-caught
      self.send("failed", kind="error", message=f"{type(e).__name__}: {e}")
    else:
      event = "stale" if result is None else "compiled"
      child_server.flush()
      self.send(event, **(result or {}))

  def _compile(
      self, module: bytes, nvdisasm: str | None, memory_bytes: int | None
  ) -> dict[str, Any] | None:
    """Returns what came out, None if Mosaic would say nothing about a kernel."""
    # pylint: disable=g-import-not-at-top
    import jax
    from jax import export
    # pylint: enable=g-import-not-at-top

    exported = export.deserialize(bytearray(module))
    sharding = jax.sharding.SingleDeviceSharding(self._device)
    args = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
        for aval in exported.in_avals
    ]
    args, kwargs = exported.in_tree.unflatten(args)
    dump = self._folder / "dump"
    shutil.rmtree(dump, ignore_errors=True)
    dump.mkdir()
    for binary in (self._folder / "binaries").iterdir():
      binary.unlink()
    with jax.default_device(self._device):
      lowered = jax.jit(exported.call).lower(*args, **kwargs)
      hashes = set(_KERNEL_HASH.findall(lowered.as_text()))
      if hashes & self._known:
        return None
      self._known |= hashes
      os.environ["MOSAIC_GPU_DUMP_TO"] = str(dump)
      started = time.perf_counter()
      with _memory_limit(memory_bytes):
        compiled = lowered.compile()
      compile_s = time.perf_counter() - started
    found = dumps.read(dump)
    if len(found) < len(hashes):
      raise RuntimeError(
          f"Mosaic wrote about {len(found)} of {len(hashes)} kernels: is the"
          f" disk of {self._folder} full?"
      )
    binaries = sorted(
        (self._folder / "binaries").iterdir(), key=lambda p: p.stat().st_mtime_ns
    )
    sass = [_disassemble(nvdisasm, path) for path in binaries] if nvdisasm else []
    return {
        "kernels": dumps.with_sass(found, sass) if nvdisasm else found,
        "xla": compiled.as_text(),
        "compile_s": compile_s,
    }


@contextlib.contextmanager
def _memory_limit(limit_bytes: int | None):
  """Lets allocations fail above a limit, on systems that can."""
  try:
    import resource  # Not on Windows. pylint: disable=g-import-not-at-top
  except ImportError:
    limit_bytes = None
  if limit_bytes is None:
    yield
    return
  # Not the address space: of that, XLA reserves much more than it uses.
  before = resource.getrlimit(resource.RLIMIT_DATA)
  resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, before[1]))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_DATA, before)


def _disassemble(nvdisasm: str, binary: pathlib.Path) -> str:
  done = subprocess.run(
      [nvdisasm, "-c", str(binary)],
      capture_output=True,
      text=True,
      errors="replace",
      check=False,
  )
  if done.returncode:
    raise RuntimeError(
        f"{nvdisasm} ended with status {done.returncode}: {done.stderr.strip()}"
    )
  return done.stdout


def main(request_fd: int, event_fd: int) -> None:
  """Serves requests until the parent closes its end, or kills the process."""
  _Worker(request_fd, event_fd).serve()
