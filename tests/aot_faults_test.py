"""What goes wrong while kernels are compiled, and that it harms nothing else."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import threading
import time
import zlib

from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from jax_mgpu_ext import aot
from jax_mgpu_ext._src import children
from jax_mgpu_ext._src import errors
from jax_mgpu_ext._src.aot import cache
from jax_mgpu_ext._src.aot import compilers
from jax_mgpu_ext._src.aot import toolchain
from tests import aot_support
from tests import child

_X = jax.ShapeDtypeStruct((128,), jnp.float32)
_PROGRAM = """
import sys
import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax_mgpu_ext import aot
def copy(x, o):
  o[...] = x[...] * 3
x = jax.ShapeDtypeStruct((128,), jnp.float32)
kernel = plgpu.kernel(copy, out_type=x)
"""


def copy_kernel(scale=1.0, inline=None):
  def body(x, o):
    o[...] = x[...] * scale
    if inline is not None:
      plgpu.inline_mgpu(arg_types=())(lambda ctx: inline())()
  return plgpu.kernel(body, out_type=_X)


def _crashes():
  from jax._src.lib.mlir.dialects import llvm

  name = "llvm.nvvm.tcgen05.fence.before.thread.sync"
  llvm.call_intrinsic(None, name, [], [], [])


def _refused():
  from jax._src.lib.mlir import ir
  from jax._src.lib.mlir.dialects import llvm

  void = ir.Type.parse("!llvm.void")
  llvm.inline_asm(void, [], "no.such.thing;", "", has_side_effects=True)


def _compile(scale=1.0, **options):
  options = {"sass": False, "cache": False, **options}
  return aot.compile_kernel(copy_kernel(scale), _X, **options)


def _pids():
  return [c._process.pid for c in compilers._pool._all]  # pylint: disable=protected-access


def _running(pids):
  found = []
  for pid in pids:
    try:
      os.kill(pid, 0)
      found.append(pid)
    except ProcessLookupError:
      pass
  return found


@aot_support.needs_compiler
class CompilerTest(aot_support.CompilingTestCase):

  def test_crash(self):
    _compile(target="b200")
    before = _pids()
    with self.assertRaises(aot.CompilerCrashError) as caught:
      aot.compile_kernel(copy_kernel(inline=_crashes), _X, cache=False)
    error = caught.exception
    self.assertEqual((error.code, error.target), ("MGPU111", "h100"))
    self.assertRegex(str(error), r"SIGABRT \[MGPU111\]\nLLVM ERROR: Cannot sel")
    self.assertLess(len(str(error)), 2000)
    # The same for other targets, the same target goes on, and so do others.
    aot.compile_kernel(copy_kernel(inline=_crashes), _X, target="b200")
    _compile()
    self.assertContainsSubset(before, _pids())

  def test_refused(self):
    _compile()
    before = _pids()
    with self.assertRaises(aot.CompileError) as caught:
      aot.compile_kernel(copy_kernel(inline=_refused), _X, cache=False)
    self.assertEqual(caught.exception.code, "MGPU114")
    self.assertNotIsInstance(caught.exception, aot.CompilerCrashError)
    self.assertIn("known instruction: 'no'", str(caught.exception))
    self.assertIn("aot_faults_test.py", str(caught.exception))
    self.assertContainsSubset(before, _pids())  # It is still of use.
    _compile()

  def test_errors_can_be_pickled(self):
    for error in (
        errors.CompileError("a", "b", "c"), errors.CompilerCrashError("a", "b"),
        errors.CompileTimeoutError("a"), errors.CompileMemoryError("a", "b", "c"),
        errors.AotUnavailableError("a"), errors.NoKernelError("a"),
        errors.TargetError("a"),
    ):
      other = pickle.loads(pickle.dumps(error))
      self.assertEqual((type(other), str(other)), (type(error), str(error)))

  def test_time_limit(self):
    _compile(2.0)
    with self.assertRaises(TimeoutError) as caught:
      _compile(3.0, timeout_s=1e-4)
    self.assertIn("time limit of 0.0001 s [MGPU112]", str(caught.exception))
    _compile(3.0, timeout_s=100)

  def test_memory_limit(self):
    _compile(2.0)
    with self.assertRaises(MemoryError) as caught:
      _compile(3.0, memory_limit_bytes=64 << 20)
    self.assertIn(f"limit of {64 << 20} bytes [MGPU113]", str(caught.exception))
    _compile(3.0, memory_limit_bytes=8 << 30)

  def test_killed_while_idle(self):
    _compile()
    for pid in _pids():
      os.kill(pid, signal.SIGKILL)
    self.assertGreater(_compile(4.0).registers, 0)

  def test_killed_while_it_compiles(self):
    _compile()
    event = children.Child.event
    def kill_first(self_, deadline):
      result = event(self_, deadline)
      if result["event"] == "begun":
        os.kill(self_._process.pid, signal.SIGKILL)  # pylint: disable=protected-access
      return result
    with absltest.mock.patch.object(children.Child, "event", kill_first):
      with self.assertRaisesRegex(aot.CompilerCrashError, "by SIGKILL"):
        _compile(5.0)
    self.assertGreater(_compile(5.0).registers, 0)

  def test_does_not_start(self):
    compilers.shut_down()
    with absltest.mock.patch.object(sys, "executable", "/bin/false"):
      with self.assertRaisesRegex(aot.CompilerCrashError, "does not start"):
        _compile()
    self.assertEmpty(_pids())

  def test_temporary_folder_is_full(self):
    _compile(6.0)
    with absltest.mock.patch.object(
        pathlib.Path, "write_bytes",
        side_effect=OSError(errno.ENOSPC, "No space left on device"),
    ):
      with self.assertRaisesRegex(OSError, "No space left"):
        _compile(7.0)
    self.assertGreater(_compile(7.0).registers, 0)

  def test_interrupt_while_a_worker_is_ended(self):
    # The next one must not wait for ever for what was interrupted.
    _compile()
    for pid in _pids():
      os.kill(pid, signal.SIGKILL)
    with absltest.mock.patch.object(
        compilers._Compiler, "close", side_effect=KeyboardInterrupt  # pylint: disable=protected-access
    ):
      with self.assertRaises(KeyboardInterrupt):
        time.sleep(0.2)
        _compile()
    self.assertGreater(_compile().registers, 0)

  def test_shut_down_beside_a_compile(self):
    outcomes = []
    def run():
      try:
        outcomes.append(_compile(8.0).registers)
      except aot.CompilerCrashError as e:
        outcomes.append(str(e))
    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
      thread.start()
    time.sleep(0.7)
    aot.shut_down()
    for thread in threads:
      thread.join(60)
      self.assertFalse(thread.is_alive())
    self.assertLen(outcomes, 3)
    self.assertGreater(_compile(8.0).registers, 0)

  def test_shut_down(self):
    _compile()
    pids = _pids()
    folders = [c.folder for c in compilers._pool._all]  # pylint: disable=protected-access
    self.assertNotEmpty(pids)
    aot.shut_down()
    self.assertEmpty(_running(pids))
    self.assertFalse(any(map(os.path.exists, folders)))
    _compile()

  def test_interrupt(self):
    program = _PROGRAM + """
import threading, _thread, time
from jax_mgpu_ext._src import children
from jax_mgpu_ext._src.aot import compilers
event = children.Child.event
def slow(self, deadline):
  result = event(self, deadline)
  if result["event"] == "begun":
    print([c._process.pid for c in compilers._pool._all], flush=True)
    time.sleep(60)
  return result
children.Child.event = slow
aot.compile_kernel(kernel, x)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.getcwd()},
    )
    pids = json.loads(process.stdout.readline())
    process.send_signal(signal.SIGINT)
    _, complaints = process.communicate(timeout=60)
    self.assertEndsWith(complaints.strip(), "KeyboardInterrupt")
    self.assertEmpty(_running(pids))
    self.assertEmpty(os.listdir(self.cache_dir))

  def test_fork(self):
    output = child.check_output(_PROGRAM + """
import os
first = aot.compile_kernel(kernel, x, cache=False, sass=False)
pid = os.fork()
if pid == 0:
  from jax_mgpu_ext._src.aot import compilers
  assert not compilers._pool._all
  os._exit(0)
print(os.waitpid(pid, 0)[1])
print(aot.compile_kernel(kernel, x, cache=False, sass=False).ptx == first.ptx)
""")
    self.assertEqual(output, "0\nTrue\n")

  @parameterized.named_parameters(
      ("plain", "t", ""), ("quotes", "a 'b\" $c", ""),
      ("killed", "t", "\nimport os, signal\nos.kill(os.getpid(), signal.SIGKILL)"),
  )
  def test_leaves_nothing_in_the_temporary_folder(self, name, end):
    folder = pathlib.Path(self.create_tempdir().full_path) / name
    folder.mkdir()
    result = child.run(
        _PROGRAM + "aot.compile_kernel(kernel, x, cache=False)" + end,
        env={"TMPDIR": str(folder)},
    )
    self.assertEqual(result.returncode, -9 if end else 0, result.stderr)
    until = time.monotonic() + 20
    while os.listdir(folder) and time.monotonic() < until:
      time.sleep(0.1)
    self.assertEmpty(os.listdir(folder))


@aot_support.needs_compiler
class CacheTest(aot_support.CompilingTestCase):

  def compile(self, scale=1.0, **options):
    return _compile(scale, cache=True, **options)

  def entries(self):
    return sorted(pathlib.Path(self.cache_dir).iterdir())

  def test_found_again(self):
    first, second = self.compile(), self.compile()
    self.assertEqual((first.cached, second.cached), (False, True))
    self.assertEqual(first.to_json(texts=True)["kernels"],
                     second.to_json(texts=True)["kernels"])
    self.assertEqual((first.xla, first.compile_s), (second.xla, second.compile_s))
    [entry] = self.entries()
    self.assertEqual(entry.suffix, ".mgpu")

  def test_what_decides_on_the_code_is_in_the_key(self):
    self.assertFalse(self.compile().cached)
    self.assertFalse(self.compile(2.0).cached)
    self.assertFalse(self.compile(target="h200").cached)
    self.assertFalse(self.compile(sass=True).cached)
    tools = toolchain.find(sass=False)
    other = toolchain.Toolchain(
        versions={**tools.versions, "jaxlib": "9"}, nvdisasm=tools.nvdisasm
    )
    with absltest.mock.patch.object(toolchain, "find", return_value=other):
      self.assertFalse(self.compile().cached)
    self.assertTrue(self.compile().cached)
    self.assertLen(self.entries(), 5)

  def test_switched_off(self):
    _compile(cache=False)
    self.assertEmpty(self.entries())
    self.compile()
    self.assertFalse(_compile(cache=False).cached)

  @parameterized.named_parameters(
      ("empty", lambda data: b""),
      ("short", lambda data: data[:40]),
      ("cut", lambda data: data[: len(data) // 2]),
      ("one_byte_less", lambda data: data[:-1]),
      ("one_byte_more", lambda data: data + b"x"),
      ("one_bit", lambda data: data[:200] + bytes([data[200] ^ 1]) + data[201:]),
      ("header", lambda data: b"X" + data[1:]),
      ("text", lambda data: b"hello"),
      ("zeros", lambda data: bytes(len(data))),
  )
  def test_damaged_entry(self, damage):
    first = self.compile()
    [entry] = self.entries()
    data = entry.read_bytes()
    entry.write_bytes(damage(data))
    again = self.compile()
    self.assertFalse(again.cached)
    self.assertEqual(again.ptx, first.ptx)
    self.assertEqual(len(entry.read_bytes()) > 1000, True)
    self.assertTrue(self.compile().cached)

  @parameterized.named_parameters(
      ("no_json", b"hello"), ("no_zlib", None), ("list", b"[1]"),
      ("other_fields", b'{"name": "NAME", "value": {"kernels": [{"a": 1}],'
       b' "xla": "", "compile_s": 1}}'),
      ("no_kernels", b'{"name": "NAME", "value": {}}'),
  )
  def test_entry_that_is_sound_and_not_ours(self, document):
    self.compile()
    [entry] = self.entries()
    body = b"no zlib" if document is None else zlib.compress(
        document.replace(b"NAME", entry.stem.encode())
    )
    entry.write_bytes(
        b"jax-mgpu-ext compiled kernel\n" + hashlib.sha256(body).digest() + body
    )
    self.assertFalse(self.compile().cached)
    self.assertTrue(self.compile().cached)

  def test_no_home(self):
    with absltest.mock.patch.object(
        cache, "folder", side_effect=RuntimeError("no home directory")
    ):
      with self.assertWarnsRegex(errors.CompileCacheWarning, "no home"):
        self.assertGreater(self.compile().registers, 0)

  def test_entry_of_another_name(self):
    self.compile()
    [one] = self.entries()
    self.compile(2.0)
    [other] = [e for e in self.entries() if e != one]
    other.write_bytes(one.read_bytes())  # Sound, but not what it is called.
    again = self.compile(2.0)
    self.assertFalse(again.cached)
    self.assertTrue(self.compile(2.0).cached)

  @parameterized.named_parameters(
      ("full", OSError(errno.ENOSPC, "No space left on device")),
      ("forbidden", PermissionError(errno.EACCES, "Permission denied")),
  )
  def test_cannot_be_written(self, error):
    with absltest.mock.patch.object(os, "replace", side_effect=error):
      with self.assertWarnsRegex(
          errors.CompileCacheWarning, f"{error.strerror}.*cache=False"
      ):
        code = self.compile()
    self.assertGreater(code.registers, 0)
    self.assertEmpty(self.entries())

  def test_folder_is_a_file(self):
    path = self.create_tempfile().full_path
    with absltest.mock.patch.dict(
        os.environ, {"JAX_MGPU_EXT_CACHE_DIR": path}
    ):
      with self.assertWarns(errors.CompileCacheWarning):
        self.assertGreater(self.compile().registers, 0)

  def test_bad_folder(self):
    with absltest.mock.patch.dict(
        os.environ, {"JAX_MGPU_EXT_CACHE_DIR": "not/absolute"}
    ):
      with self.assertRaisesRegex(errors.ConfigError, "absolute path"):
        self.compile()

  def test_default_folder(self):
    env = {"XDG_CACHE_HOME": self.cache_dir, "JAX_MGPU_EXT_CACHE_DIR": ""}
    output = child.check_output("""
        from jax_mgpu_ext._src.aot import cache
        print(cache.folder())
    """, env=env)
    if sys.platform == "linux":
      self.assertEqual(
          output.strip(), f"{self.cache_dir}/jax-mgpu-ext/compiled"
      )

  def test_processes_at_a_time(self):
    program = _PROGRAM + """
code = aot.compile_kernel(kernel, x, sass=False)
print(code.ptx)
"""
    env = {"JAX_MGPU_EXT_CACHE_DIR": self.cache_dir}
    outputs = []
    def run():
      outputs.append(child.check_output(program, env=env))
    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
    self.assertLen(outputs, 3)
    self.assertLen(set(outputs), 1)
    self.assertLen(self.entries(), 1)

  def test_killed_while_it_writes(self):
    program = _PROGRAM + """
import os, signal
os.replace = lambda *paths: os.kill(os.getpid(), signal.SIGKILL)
aot.compile_kernel(kernel, x, sass=False)
"""
    env = {"JAX_MGPU_EXT_CACHE_DIR": self.cache_dir}
    self.assertEqual(child.run(program, env=env).returncode, -signal.SIGKILL)
    self.assertEqual({e.suffix for e in self.entries()}, {".part"})
    program = _PROGRAM + "print(aot.compile_kernel(kernel, x, sass=False).cached)"
    self.assertEqual(child.check_output(program, env=env), "False\n")
    self.assertEqual(child.check_output(program, env=env), "True\n")

  def test_the_oldest_go(self):
    for scale in (1.0, 2.0, 3.0):
      self.compile(scale)
    oldest, *others = self.entries()
    os.utime(oldest, (1, 1))
    # Room for three and a half of them, which are of about one size.
    size = max(e.stat().st_size for e in (oldest, *others))
    cache._stores.clear()  # pylint: disable=protected-access
    with absltest.mock.patch.object(cache, "MAX_BYTES", size * 7 // 2):
      self.compile(4.0)
    self.assertNotIn(oldest, self.entries())
    self.assertLen(self.entries(), 3)

  def test_clear(self):
    self.compile()
    self.compile(2.0)
    keep = pathlib.Path(self.cache_dir) / "notes.txt"
    keep.write_text("not ours", encoding="utf-8")
    self.assertEqual(aot.clear_cache(), 2)
    self.assertEqual(self.entries(), [keep])


class UnavailableTest(parameterized.TestCase):
  """Without the extra there is one clear error."""

  @parameterized.named_parameters(
      ("plugin", {"jax-cuda12-plugin": None, "jax-cuda13-plugin": None},
       r"needs XLA's CUDA plugin.*pip install 'jax-mgpu-ext\[aot\]' \[MGPU110\]"),
      ("other_plugin", {"jax-cuda12-plugin": "0.1", "jax-cuda12-pjrt": "0.1"},
       r"expected jax-cuda12-plugin [\d.]+, the version of jax, got 0.1: pip"),
      ("no_pjrt", {"jax-cuda12-plugin": jax.__version__, "jax-cuda12-pjrt": None},
       r"expected jax-cuda12-pjrt [\d.]+, the version of jax, got none: pip"),
  )
  def test_packages(self, versions, says):
    version = toolchain.installed.version
    with absltest.mock.patch.object(
        toolchain.installed, "version",
        lambda name: versions[name] if name in versions else version(name),
    ):
      with self.assertRaisesRegex(ImportError, says):
        _compile()

  def test_tools(self):
    if why_not := aot_support.why_not():
      self.skipTest(why_not)
    with absltest.mock.patch.object(
        toolchain.installed, "tool_paths", return_value=[]
    ):
      with self.assertRaisesRegex(ImportError, "nvidia-cuda-nvdisasm"):
        toolchain.find(sass=True)
      self.assertIsNone(toolchain.find(sass=False).nvdisasm)


if __name__ == "__main__":
  absltest.main()
