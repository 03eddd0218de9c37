"""The processes that compile, seen from the caller's: one or more a target.

They are started when they are needed, kept for the next kernel, and end with this
process, or after some minutes without work.
"""

from __future__ import annotations

import atexit
from collections.abc import Iterator
import contextlib
import os
import pathlib
import re
import shutil
import tempfile
import threading
import time
from typing import Any

from jax_mgpu_ext._src import children
from jax_mgpu_ext._src import errors
from jax_mgpu_ext._src.targets import Target

# For importing JAX and loading the compiler, which is no part of any kernel's
# time; in seconds.
_START_S = 120.0
# How often one may end before it has begun.
_MAX_DEATHS = 3
# How much of what a compiler printed is told, in lines: of what looks like the
# reason, or else of the end.
_MAX_LINES = 20
_PREFIX = "mgpu-ext-"
_REASON = re.compile(
    r"LLVM ERROR|\berror\b|\bfatal\b|Check failed|Assertion|terminate called"
    r"|what\(\)|RAW:|bad_alloc|RESOURCE_EXHAUSTED|^F\d{4} ",
    re.IGNORECASE,
)
# What is said where there is a limit and an allocation fails.
_NO_MEMORY = (
    "bad_alloc", "out of memory", "MemoryError", "Cannot allocate", "mmap error",
    "pthread_create() failed", "Failed to launch ptxas",
)


class _Compiler(children.Child):
  """A process that compiles for one target."""

  # A crash of LLVM prints its stack after the reason.
  output_bytes = 1 << 17

  def __init__(self, target: Target):
    self.target = target
    _remove_orphans()
    self.folder = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-")
    try:
      super().__init__(
          "jax_mgpu_ext._src.aot.worker",
          env={
              "JAX_PLATFORMS": "cpu",
              # The hooks have done their work when the kernel was lowered.
              "JAX_MGPU_EXT": "off",
              "TF_CPP_MIN_LOG_LEVEL": "1",
              # It must not keep what it compiled: nothing would be dumped.
              "JAX_ENABLE_COMPILATION_CACHE": "false",
              # Types are as the caller's JAX has made them.
              "JAX_ENABLE_X64": "true",
              "TMPDIR": self.folder,
          },
          folder=self.folder,
      )
    except BaseException:
      shutil.rmtree(self.folder, ignore_errors=True)
      raise
    self.request(
        "start", config=target.xla_target_config(), folder=self.folder
    )
    self._ready = False

  def wait_until_ready(self) -> None:
    """Waits for the end of the start, however often it is called."""
    if not self._ready:
      self.event(time.monotonic() + _START_S)
      self._ready = True

  def close(self) -> None:
    super().close()
    shutil.rmtree(self.folder, ignore_errors=True)


def _remove_orphans() -> None:
  """Removes what processes have left behind that were killed."""
  for folder in pathlib.Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*"):
    owner = folder.name.removeprefix(_PREFIX).partition("-")[0]
    if owner.isdecimal():
      try:
        os.kill(int(owner), 0)
      except ProcessLookupError:
        shutil.rmtree(folder, ignore_errors=True)
      except (OSError, OverflowError):
        pass  # Somebody else's.


class _Pool:
  """The compilers of this process."""

  def __init__(self):
    self._condition = threading.Condition()
    self._idle: dict[Target, list[_Compiler]] = {}
    self._busy: dict[Target, int] = {}
    self._all: set[_Compiler] = set()

  @contextlib.contextmanager
  def compiler(
      self, target: Target, limit: int, *, fresh: bool = False
  ) -> Iterator[_Compiler]:
    """Lends a compiler; an exception in the block ends it.

    Args:
      target: What it compiles for.
      limit: How many there may be for the target; waits for one if all are
        busy.
      fresh: Whether it must be one that has compiled nothing yet.
    """
    ended, compiler, counted, healthy = [], None, False, False
    try:
      with self._condition:
        while True:
          idle = self._idle.setdefault(target, [])
          ended += [c for c in idle if c.has_ended()]
          idle[:] = [c for c in idle if not c.has_ended()]
          if idle and fresh:
            ended.append(idle.pop())
          elif idle:
            compiler = idle.pop()
          if compiler or self._busy.get(target, 0) < limit:
            break
          self._condition.wait()
        counted = True
        self._busy[target] = self._busy.get(target, 0) + 1
      for other in ended:
        self._end(other)
      if compiler is None:
        compiler = _Compiler(target)
        with self._condition:
          self._all.add(compiler)
      compiler.wait_until_ready()
      yield compiler
      healthy = True
    finally:
      # First what others wait for: ending a process takes its time, and may be
      # interrupted.
      with self._condition:
        if counted:
          self._busy[target] -= 1
        # One that was ended meanwhile, by `close`, is not lent again.
        if healthy and compiler in self._all:
          self._idle[target].append(compiler)
        self._condition.notify_all()
      if compiler is not None and not healthy:
        self._end(compiler)

  def _end(self, compiler: _Compiler) -> None:
    with self._condition:
      self._all.discard(compiler)
    compiler.close()

  def close(self) -> None:
    """Ends all compilers, also those that are at work."""
    with self._condition:
      compilers = list(self._all)
      self._all.clear()
      for idle in self._idle.values():
        idle.clear()
    for compiler in compilers:
      compiler.hang_up()  # All of them, before waiting for the first.
    for compiler in compilers:
      compiler.close()


_pool = _Pool()
atexit.register(lambda: _pool.close())  # pylint: disable=unnecessary-lambda


def _forget() -> None:
  global _pool
  _pool = _Pool()


# The compilers of the parent are not those of a process that it forked.
if hasattr(os, "register_at_fork"):
  os.register_at_fork(after_in_child=_forget)


# Counts the calls of `shut_down`.
_shut_downs = 0


def shut_down() -> None:
  """Ends the processes that compile; the next kernel starts new ones.

  What is being compiled in other threads ends with an error.
  """
  global _shut_downs
  _shut_downs += 1
  _pool.close()


def session() -> int:
  """Returns what changes with `shut_down`: see `compile_module`."""
  return _shut_downs


def compile_module(
    module: bytes,
    target: Target,
    *,
    nvdisasm: str | None,
    timeout_s: float,
    memory_limit_bytes: int | None,
    workers: int = 1,
    started_in: int | None = None,
) -> dict[str, Any]:
  """Compiles a module in a process of its own.

  Args:
    module: The serialized module, of `lowering`.
    target: What to compile for.
    nvdisasm: The disassembler, None if no SASS is wanted.
    timeout_s: Time limit, in seconds.
    memory_limit_bytes: How much memory the process may use, or None.
    workers: How many processes there may be for the target.
    started_in: The `session` that the caller began in: if it is over, nothing is
      compiled any more.

  Returns:
    What the worker sent: see `worker`.

  Raises:
    CompileError: The compiler refused it, ended, or took too long.
  """
  begun_in = session() if started_in is None else started_in
  fresh, deaths = False, 0
  while True:
    if session() != begun_in:
      raise errors.CompilerCrashError(
          f"the compiler for {target.name} was ended by shut_down()", target.name
      )
    try:
      with _pool.compiler(target, workers, fresh=fresh) as compiler:
        event = _compile(
            compiler, module, nvdisasm, timeout_s, memory_limit_bytes
        )
        if event["event"] == "stale":
          raise _Stale()
      return _outcome(event, target, memory_limit_bytes)
    except _Stale:
      fresh = True  # Only a fresh process will say what it does.
    except children.ChildTimeout as timeout:
      raise errors.CompileTimeoutError(
          f"the compiler for {target.name} did not start in {_START_S:g} s",
          target.name,
      ) from timeout
    except children.ChildDied as died:
      # It ended of its own while it was idle, or somebody ended it, before it
      # had begun: that says nothing about the kernel.
      deaths += 1
      if deaths == _MAX_DEATHS:
        raise errors.CompilerCrashError(
            f"the compiler for {target.name} does not start: {died}", target.name
        ) from died


class _Stale(Exception):
  """The process has compiled a kernel of the module before."""


def _compile(
    compiler: _Compiler,
    module: bytes,
    nvdisasm: str | None,
    timeout_s: float,
    memory_limit_bytes: int | None,
) -> dict[str, Any]:
  """Has one compiler compile, and returns the event that it ends with.

  Raises:
    ChildDied: It ended before it had begun.
    CompileError: It ended, or took too long, after that.
  """
  path = pathlib.Path(compiler.folder) / "module"
  path.write_bytes(module)
  compiler.take_output()
  compiler.request(
      "compile",
      module=str(path),
      nvdisasm=nvdisasm,
      memory_bytes=memory_limit_bytes,
  )
  name = compiler.target.name
  deadline = time.monotonic() + timeout_s
  try:
    compiler.event(time.monotonic() + _START_S)  # It has begun.
    try:
      event = compiler.event(deadline)
    except children.ChildDied as died:
      output = _last_words(compiler.take_output())
      if memory_limit_bytes and any(word in output for word in _NO_MEMORY):
        raise _memory_error(name, memory_limit_bytes, output) from died
      raise errors.CompilerCrashError(
          f"the compiler for {name} ended while it compiled the kernel: {died}",
          name, output,
      ) from died
  except children.ChildTimeout as timeout:
    raise errors.CompileTimeoutError(
        f"the compiler for {name} was not done within the time limit of"
        f" {timeout_s:g} s",
        name, _last_words(compiler.take_output()),
    ) from timeout
  if event["event"] == "failed":
    event["output"] = _last_words(compiler.take_output())
  return event


def _outcome(
    event: dict[str, Any], target: Target, memory_limit_bytes: int | None
) -> dict[str, Any]:
  """Returns what a compiler has sent, or raises it if it was an error."""
  if event["event"] == "compiled":
    return event
  message = event["message"].strip()
  if event["kind"] == "memory" or (
      memory_limit_bytes and any(word in message for word in _NO_MEMORY)
  ):
    raise _memory_error(target.name, memory_limit_bytes, message)
  raise errors.CompileError(
      f"the compiler for {target.name} refused the kernel", target.name,
      "\n".join(filter(None, (message, event["output"]))),
  )


def _memory_error(
    name: str, limit_bytes: int | None, output: str
) -> errors.CompileMemoryError:
  limit = f" of {limit_bytes} bytes" if limit_bytes else ""
  return errors.CompileMemoryError(
      f"the compiler for {name} ran out of memory, with a limit{limit}",
      name, output,
  )


def _last_words(output: str) -> str:
  """Returns what a compiler said about its end."""
  lines = output.splitlines()
  reasons = list(dict.fromkeys(filter(_REASON.search, lines)))
  return "\n".join(reasons[-_MAX_LINES:] or lines[-_MAX_LINES:])
