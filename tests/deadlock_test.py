"""Hangs in interpret mode end, with the right report, and nothing else does."""

from __future__ import annotations

import concurrent.futures
import json
import os
import pathlib
import pickle
import re
import subprocess
import sys
import tempfile
import threading
import time

from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np

import jax_mgpu_ext
from jax_mgpu_ext import deadlock
from jax_mgpu_ext import specs
from jax_mgpu_ext._src import hooks
from tests import child
from tests.negatives import kernels

_OLD = jax.__version__.startswith("0.10")
_ONES = jnp.zeros((128,), jnp.float32)
# From the start to the end of a run: the interpreter compiles each kernel.
_LIMIT_S = 20.0


def setUpModule():
  if _OLD:
    raise absltest.SkipTest("the interpreter of JAX 0.10.2 cannot be failed")


class ThreadsTestCase(parameterized.TestCase):
  """Its tests leave no thread behind; those of other tests do not count."""

  def setUp(self):
    super().setUp()
    before = set(threading.enumerate())

    def check():
      end = time.monotonic() + 2
      while time.monotonic() < end and new():
        time.sleep(0.01)
      self.assertEqual(new(), [])

    def new():
      return [
          thread for thread in threading.enumerate()
          if thread not in before
          # XLA's threads, that callbacks ran on.
          and not isinstance(thread, threading._DummyThread)  # pylint: disable=protected-access
      ]

    self.addCleanup(check)


def run(case, bad):
  return deadlock.run(
      case.kernel(bad), _ONES, timeout_s=case.timeout_s if bad else None
  )


class NegativesTest(ThreadsTestCase):

  @parameterized.named_parameters((c.name, c) for c in kernels.CASES)
  def test_bad(self, case):
    texts = set()
    for _ in range(3):
      started = time.monotonic()
      with self.assertRaises(deadlock.DeadlockError) as caught:
        run(case, True)
      self.assertLess(time.monotonic() - started, _LIMIT_S)
      error = caught.exception
      self.assertEqual(error.code, case.code, str(error))
      texts.add(str(error.report))
    self.assertIn(f"[{case.code}]", str(error))
    if case.barrier is not None:
      self.assertEqual(
          re.search(r"`(.*?)`", str(error))[1], case.barrier, str(error)
      )
    if case.line() is not None:
      self.assertEqual(
          re.search(r"kernels\.py:(\d+)", str(error))[1], str(case.line()),
          str(error),
      )
    if case.code != "DL009":
      self.assertLen(texts, 1)  # The same each time.

  @parameterized.named_parameters((c.name, c) for c in kernels.CASES)
  def test_twin(self, case):
    for _ in range(3):
      self.assertEqual(run(case, False).shape, (128,))

  def test_enough_of_each(self):
    count = {}
    for case in kernels.CASES:
      count[case.code] = count.get(case.code, 0) + 1
    self.assertGreaterEqual(min(count.values()), 2, count)
    self.assertGreaterEqual(len(kernels.CASES), 24)
    self.assertEqual(set(count), set(hooks.load("interpret_deadlock").codes))


_STAGES = 3
_FAULTS = (
    "none", "no_release", "wrong_stage", "early_return", "no_second_consumer",
    "no_last_copy",
)


def _pipeline(steps, fault):
  """A ring for two consumers, wrong in one way."""

  def body(x, o, *, ring):
    del o
    wg = lax.axis_index("wg")

    @pl.when(wg == 0)
    def _producer():
      @pl.loop(0, steps)
      def _fill(step):
        ring.producer_acquire(step)
        if fault == "no_last_copy":
          pl.when(step < steps - 1)(lambda: ring.copy_in(x, step=step))
        else:
          ring.copy_in(x, step=step)
      ring.producer_tail(steps)

    @pl.when((wg > 0) & ((wg == 1) | (fault != "no_second_consumer")))
    def _consumer():
      last = steps - 1 if fault == "early_return" else steps

      @pl.loop(0, jnp.where(wg == 2, last, steps))
      def _drain(step):
        ring.consumer_wait(step)
        if fault == "no_release":
          pl.when((wg == 1) | (step < steps - 1))(
              lambda: ring.consumer_release(step))
        elif fault == "wrong_stage":
          ring.consumer_release(step + jnp.where(wg == 2, 1, 0))
        else:
          ring.consumer_release(step)

  return jax.jit(plgpu.kernel(
      body, out_type=jax.ShapeDtypeStruct((128,), jnp.float32),
      scratch_types=dict(ring=specs.RingBuffer(
          plgpu.SMEM((128,), jnp.float32), _STAGES, num_consumers=2,
          consumer_reads="generic")),
      num_threads=3, thread_name="wg", interpret=plgpu.InterpretGPUParams(),
  ))


class TripCountsTest(ThreadsTestCase):

  @parameterized.product(
      steps=(0, 1, _STAGES - 1, _STAGES, _STAGES + 1), fault=_FAULTS
  )
  def test_pipeline(self, steps, fault):
    kernel = _pipeline(steps, fault)
    if fault == "wrong_stage" and steps and not steps % _STAGES:
      steps += 1  # Each stage gets its two releases all the same.
      kernel = _pipeline(steps, fault)
    if fault == "none" or not steps:
      deadlock.run(kernel, _ONES)
      return
    with self.assertRaises(deadlock.DeadlockError) as caught:
      deadlock.run(kernel, _ONES)
    if fault != "wrong_stage":
      self.assertIn(caught.exception.code, ("DL001", "DL002", "DL003"))
    # The next kernel runs as if nothing had been.
    deadlock.run(_pipeline(steps, "none"), _ONES)


class ReportTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    case = next(
        c for c in kernels.CASES if c.name == "one_consumer_leaves_early"
    )
    with self.assertRaises(deadlock.DeadlockError) as caught:
      run(case, True)
    self.error = caught.exception
    self.report = self.error.report

  def test_text(self):
    text = str(self.report)
    for piece in (
        "warpgroup 2, which arrived in earlier phases, has finished",
        "Threads:", "Barriers:", "Last events of each thread:",
        "ring.empty[1]", "ring.full[0]", "producer_acquire",
    ):
      self.assertIn(piece, text)
    self.assertNotRegex(text, r"0x[0-9a-f]+|\d{12,}")
    self.assertEqual(str(self.error), self.report.summary)
    self.assertNotIn("\n", self.report.summary)

  def test_tables(self):
    states = {row["thread"]: row for row in self.report.threads}
    self.assertEqual(
        {name: row["state"] for name, row in states.items()},
        {"warpgroup 0": "blocked", "warpgroup 1": "blocked",
         "warpgroup 2": "finished"},
    )
    self.assertEqual(states["warpgroup 0"]["barrier"], "ring.empty[1]")
    (row,) = [r for r in self.report.barriers if r["barrier"] == "ring.empty[1]"]
    self.assertEqual((row["have"], row["need"], row["phase"]), (1, 2, 1))
    self.assertEqual(row["arrived"], ["warpgroup 1"])

  def test_json_and_pickle(self):
    found = json.loads(self.report.to_json())
    self.assertEqual(found["code"], "DL002")
    self.assertLen(found["threads"], 3)
    again = pickle.loads(pickle.dumps(self.error))
    self.assertEqual((again.code, str(again)), (self.error.code, str(self.error)))

  def test_last_report(self):
    self.assertIs(deadlock.last_report().code, self.report.code)


class StateTest(ThreadsTestCase):
  """Nothing of a run is left for the next one."""

  def test_exception_in_the_kernel(self):
    def body(x, o, *, done):
      @kernels.thread(0)
      def _waits():
        plgpu.barrier_wait(done.at[0])
        o[...] = x[...]

      @kernels.thread(1)
      def _fails():
        plgpu.barrier_arrive(done.at[lax.axis_index("wg") + 5])

    kernel = plgpu.kernel(
        body, out_type=jax.ShapeDtypeStruct((128,), jnp.float32),
        scratch_types=dict(done=plgpu.Barrier(num_barriers=2)),
        interpret=plgpu.InterpretGPUParams(), **kernels.TWO_THREADS,
    )
    with self.assertRaisesRegex(Exception, "barrier index 6 is out of range"):
      deadlock.run(kernel, _ONES)
    run(kernels.CASES[0], False)

  def test_twenty_at_once(self):
    cases = [c for c in kernels.CASES if c.timeout_s is None][:20]
    self.assertLen(cases, 20)

    def outcome(number):
      try:
        run(cases[number], number % 2 == 0)
        return "ok"
      except deadlock.DeadlockError as e:
        return e.code

    with concurrent.futures.ThreadPoolExecutor(20) as pool:
      found = list(pool.map(outcome, range(20)))
    self.assertEqual(
        found,
        [c.code if n % 2 == 0 else "ok" for n, c in enumerate(cases)],
    )

  def test_scope_that_not_all_enter(self):
    def body(x, o):
      del x, o

      @kernels.thread(0)
      def _enters():
        pl.run_scoped(
            lambda inner: None, plgpu.Barrier(num_barriers=()),
            collective_axes="wg",
        )

    kernel = plgpu.kernel(
        body, out_type=jax.ShapeDtypeStruct((128,), jnp.float32),
        interpret=plgpu.InterpretGPUParams(), **kernels.TWO_THREADS,
    )
    with self.assertRaisesRegex(
        deadlock.DeadlockError,
        "`inner` was allocated by warpgroup 0 alone.*DL006",
    ):
      deadlock.run(kernel, _ONES)

  def test_grid_index(self):
    def body(x, o, *, done):
      del x, o

      @pl.when((lax.axis_index("g") == 2) & (lax.axis_index("wg") == 1))
      def _waits():
        plgpu.barrier_wait(done)

    kernel = plgpu.kernel(
        body, out_type=jax.ShapeDtypeStruct((128,), jnp.float32),
        scratch_types=dict(done=plgpu.Barrier(num_barriers=())), grid=(4,),
        grid_names=("g",), interpret=plgpu.InterpretGPUParams(),
        **kernels.TWO_THREADS,
    )
    with self.assertRaisesRegex(
        deadlock.DeadlockError, "at grid index 2: warpgroup 1 waits for `done`"
    ):
      deadlock.run(kernel, _ONES)

  def test_extra_arrival_in_a_cluster(self):
    def body(x, o, *, done):
      del x, o
      plgpu.barrier_arrive(done)
      pl.when(lax.axis_index("block") == 0)(lambda: plgpu.barrier_arrive(done))
      plgpu.barrier_wait(done)

    kernel = plgpu.kernel(
        body, out_type=jax.ShapeDtypeStruct((128,), jnp.float32),
        scratch_types=dict(done=plgpu.ClusterBarrier(
            collective_axes=("block",), num_barriers=())),
        interpret=plgpu.InterpretGPUParams(), **kernels.TWO_BLOCKS,
    )
    with self.assertRaisesRegex(
        deadlock.DeadlockError,
        "1 of 2 arrivals in phase 1 when its scope ends; in all, block 0,"
        " warpgroup 0 arrived 2 times at .*; block 1, warpgroup 0 arrived once",
    ):
      deadlock.run(kernel, _ONES)

  def test_large_arrays(self):
    # XLA takes threads of its own for them, and runs callbacks there.
    def body(x, o, *, done):
      for step in range(2):
        o[...] = jnp.exp(x[...])
        if not step:
          plgpu.barrier_arrive(done)
        plgpu.barrier_wait(done)

    x = jnp.zeros((512, 512), jnp.float32)
    kernel = jax.jit(plgpu.kernel(
        body, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_types=dict(done=plgpu.Barrier(num_barriers=())),
        interpret=plgpu.InterpretGPUParams(),
    ))
    for _ in range(12):
      with self.assertRaises(deadlock.DeadlockError) as caught:
        deadlock.run(kernel, x, timeout_s=30)
      self.assertEqual(caught.exception.code, "DL002")
      self.assertLen(caught.exception.report.threads, 1)

  def test_the_limit_is_that_of_the_own_kernel(self):
    slow = _pipeline(300, "none")
    deadlock.run(slow, _ONES)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
      other = pool.submit(deadlock.run, slow, _ONES)
      time.sleep(0.1)
      run(kernels.CASES[0], False)
      with self.assertRaisesRegex(deadlock.DeadlockError, "DL009"):
        poll = next(c for c in kernels.CASES if c.name == "polls_memory")
        deadlock.run(poll.kernel(True), _ONES, timeout_s=0.2)
      self.assertEqual(other.result().shape, (128,))

  def test_what_fails_after_a_hang(self):
    def function():
      try:
        jax.block_until_ready(kernels.CASES[0].kernel(True)(_ONES))
      except Exception:  # pylint: disable=broad-exception-caught
        pass
      return 1 / 0

    with self.assertRaises(ZeroDivisionError):
      deadlock.run(function)

  def test_switched_off_in_between(self):
    kernel = kernels.CASES[0].kernel(False)
    deadlock.run(kernel, _ONES)
    jax_mgpu_ext.deactivate()
    try:
      jax.block_until_ready(kernel(_ONES))
    finally:
      jax_mgpu_ext.activate()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
      pool.submit(run, kernels.CASES[1], False).result(timeout=20)

  def test_several_devices(self):
    out = child.check_output("""
        import os
        os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
        import jax, jax.numpy as jnp
        from jax import lax
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import mosaic_gpu as plgpu
        from jax.sharding import PartitionSpec as P
        import jax_mgpu_ext
        from jax_mgpu_ext import deadlock

        def make(bad):
          def body(x, o, *, done):
            @pl.when((lax.axis_index("d") == 0) | (not bad))
            def _():
              plgpu.barrier_arrive(done)
            plgpu.barrier_wait(done)
            o[...] = x[...]
          kernel = plgpu.kernel(
              body, out_type=jax.ShapeDtypeStruct((64,), jnp.float32),
              scratch_types=dict(done=plgpu.Barrier(num_barriers=())),
              interpret=plgpu.InterpretGPUParams())
          mesh = jax.make_mesh((2,), ("d",))
          return jax.jit(jax.shard_map(
              kernel, mesh=mesh, in_specs=P("d"), out_specs=P("d"),
              check_vma=False))

        x = jax.device_put(
            jnp.arange(128, dtype=jnp.float32),
            jax.NamedSharding(jax.make_mesh((2,), ("d",)), P("d")))
        print(bool((deadlock.run(make(False), x) == x).all()))
        try:
          deadlock.run(make(True), x)
        except deadlock.DeadlockError as e:
          print(e.code)
        print(bool((deadlock.run(make(False), x) == x).all()))
    """)
    self.assertEqual(out, "True\nDL002\nTrue\n")

  def test_interrupts_at_any_moment(self):
    out = child.check_output("""
        import os, random, signal, threading, time
        import jax, jax.numpy as jnp
        import jax_mgpu_ext
        from jax_mgpu_ext import deadlock
        from tests.negatives import kernels
        x = jnp.zeros((128,), jnp.float32)
        case = next(c for c in kernels.CASES
                    if c.name == "one_consumer_leaves_early")
        good, bad = case.kernel(False), case.kernel(True)
        deadlock.run(good, x)
        generator = random.Random(0)
        for number in range(40):
          timer = threading.Timer(
              generator.uniform(0, 0.06), os.kill, (os.getpid(), signal.SIGINT))
          try:
            timer.start()
            try:
              deadlock.run(generator.choice([good, bad]), x)
            except (deadlock.DeadlockError, Exception):
              pass
            timer.join()
            time.sleep(0.01)
          except KeyboardInterrupt:
            pass
          timer.join()
          try:
            time.sleep(0.01)
          except KeyboardInterrupt:
            pass
          deadlock.run(good, x)
        print("done", threading.active_count())
    """)
    self.assertEqual(out, "done 1\n")

  def test_bad_time_limits(self):
    for timeout_s in (-1, 0, "1", float("nan"), float("inf")):
      with self.assertRaisesRegex(ValueError, "positive number of seconds"):
        deadlock.run(lambda: 1, timeout_s=timeout_s)

  def test_without_run(self):
    # The caller gets JAX's exception, with our words in it, and can go on.
    with self.assertRaisesRegex(Exception, r"\[DL001\]"):
      jax.block_until_ready(kernels.CASES[0].kernel(True)(_ONES))
    run(kernels.CASES[0], False)

  def test_keyboard_interrupt(self):
    out = child.check_output("""
        import os, signal, threading
        import jax, jax.numpy as jnp
        import jax_mgpu_ext
        from jax_mgpu_ext import deadlock
        from tests.negatives import kernels
        slow = next(c for c in kernels.CASES if c.name == "polls_memory")
        x = jnp.zeros((128,), jnp.float32)
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
          deadlock.run(slow.kernel(True), x, timeout_s=3)
        except BaseException as e:
          print(type(e).__name__)
        deadlock.run(kernels.CASES[0].kernel(False), x)
        print(threading.active_count())
    """)
    self.assertEqual(out, "KeyboardInterrupt\n1\n")

  def test_under_load(self):
    busy = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(2)
    ]
    try:
      for case in kernels.CASES[::4]:
        if case.timeout_s is None:
          with self.assertRaises(deadlock.DeadlockError) as caught:
            run(case, True)
          self.assertEqual(caught.exception.code, case.code)
          run(case, False)
    finally:
      for process in busy:
        process.kill()
        process.wait()


class GapsTest(parameterized.TestCase):
  """Faults that the interpreter alone passes over."""

  def _run(self, body, scratch, **mesh):
    kernel = plgpu.kernel(
        body, out_type=jax.ShapeDtypeStruct((128,), jnp.float32),
        scratch_types=scratch, interpret=plgpu.InterpretGPUParams(), **mesh,
    )
    return deadlock.run(kernel, _ONES)

  @parameterized.parameters((0, None), (1, None), (2, 2), (-1, -1))
  def test_barrier_index(self, offset, outside):
    def body(x, o, *, done):
      del x, o
      index = lax.axis_index("g") + offset
      plgpu.barrier_arrive(done.at[index])
      plgpu.barrier_wait(done.at[index])

    use = lambda: self._run(
        body, dict(done=plgpu.Barrier(num_barriers=2)), grid=(1,),
        grid_names=("g",),
    )
    if outside is None:
      use()
    else:
      with self.assertRaisesRegex(
          Exception, rf"barrier index {outside} is out of range .*MGPU026"
      ):
        use()

  @parameterized.parameters((1024, False), (56, True))
  def test_shared_memory(self, kib, fits):
    def body(x, o, *, large):
      del large
      o[...] = x[...]

    use = lambda: self._run(
        body, dict(large=plgpu.SMEM((kib * 4, 256), jnp.float32))
    ) if not fits else self._run(
        body, dict(large=plgpu.SMEM((kib, 1024), jnp.float32))
    )
    if fits:
      use()
    else:
      with self.assertRaisesRegex(
          jax_mgpu_ext.SpecError, "232448 bytes of SMEM.*4194304.*MGPU101"
      ):
        use()

  def test_shared_memory_of_scopes(self):
    def body(x, o, *, outer):
      del outer
      pl.run_scoped(
          lambda inner: o.__setitem__(..., x[...]),
          plgpu.SMEM((32, 1024), jnp.float32),
      )

    self._run(body, dict(outer=plgpu.SMEM((16, 1024), jnp.float32)))
    with self.assertRaisesRegex(jax_mgpu_ext.SpecError, "MGPU101"):
      self._run(body, dict(outer=plgpu.SMEM((32, 1024), jnp.float32)))

  def test_semaphores(self):
    def body(x, o, *, s):
      del s
      o[...] = x[...]

    with self.assertRaisesRegex(
        NotImplementedError, "semaphores .*not supported in .*interpret mode"
    ):
      self._run(body, dict(s=plgpu.SemaphoreType.REGULAR))


class TimelineTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    self.folder = pathlib.Path(folder.name)

  def _trace(self, name, fault="none"):
    path = self.folder / name
    with deadlock.trace(path):
      try:
        deadlock.run(_pipeline(5, fault), _ONES)
      except deadlock.DeadlockError:
        assert fault != "none"
    return path

  def test_chrome_trace(self):
    path = self._trace("one.json")
    found = json.loads(path.read_text())
    events = found["traceEvents"]
    tracks = {
        e["args"]["name"] for e in events if e["name"] == "thread_name"
    }
    self.assertContainsSubset(
        {"block 0, warpgroup 0", "block 0, warpgroup 2", "block 0, ring.full[0]",
         "block 0, ring.empty[2]", "block 0, warpgroup 0, copies"}, tracks,
    )
    phases = [e for e in events if e.get("cat") == "phase"]
    self.assertLen(phases, 10)  # Five steps, full and empty.
    copies = [e for e in events if e.get("cat") == "copy"]
    self.assertEqual([e["ph"] for e in copies].count("b"), 5)
    # An arrow goes forward in time.
    starts = {e["id"]: e["ts"] for e in events if e["ph"] == "s"}
    ends = {e["id"]: e["ts"] for e in events if e["ph"] == "f"}
    self.assertEqual(starts.keys(), ends.keys())
    self.assertTrue(all(starts[i] <= ends[i] for i in starts))
    # No wait ends before the phase that it waits for.
    self.assertEqual(path.read_text(), self._trace("two.json").read_text())

  def test_hang(self):
    path = self._trace("hang.json", "early_return")
    found = json.loads(path.read_text())["traceEvents"]
    stuck = [e for e in found if e.get("cat") == "stuck"]
    self.assertNotEmpty(stuck)
    self.assertIn("for ever", stuck[0]["name"])
    self.assertIn("deadlock_test.py", stuck[0]["args"]["line"])

  def test_picture(self):
    try:
      import matplotlib  # pylint: disable=g-import-not-at-top,unused-import
    except ImportError:
      with self.assertRaisesRegex(ImportError, "pip install"):
        self._trace("no.png")
      return
    path = self._trace("one.png", "early_return")
    self.assertEqual(path.read_bytes()[:4], b"\x89PNG")

  def test_one_in_another(self):
    outer, inner = self.folder / "outer.json", self.folder / "inner.json"
    with deadlock.trace(outer):
      with deadlock.trace(inner):
        deadlock.run(_pipeline(2, "none"), _ONES)
    self.assertEqual(outer.read_text(), inner.read_text())
    with deadlock.trace(outer):
      with deadlock.trace(inner):
        pass
      deadlock.run(_pipeline(2, "none"), _ONES)
    self.assertGreater(outer.stat().st_size, inner.stat().st_size)

  def test_a_folder_that_goes(self):
    gone = self.folder / "gone"
    gone.mkdir()
    with self.assertRaises(deadlock.DeadlockError) as caught:
      with deadlock.trace(gone / "t.json"):
        gone.rmdir()
        deadlock.run(_pipeline(5, "early_return"), _ONES)
    self.assertIn("could not be written", caught.exception.__notes__[0])

  def test_bad_paths(self):
    for path, kind in (
        (self.folder, ValueError), (self.folder / "t.svg", ValueError),
        (self.folder / "no" / "file.json", OSError),
    ):
      with self.assertRaises(kind):
        with deadlock.trace(path):
          self.fail("nothing should run")
    self.assertEmpty(list(self.folder.iterdir()))


if __name__ == "__main__":
  absltest.main()
