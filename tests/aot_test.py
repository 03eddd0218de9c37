"""Compiling for GPUs that are not there: what comes out, and how it is kept."""

from __future__ import annotations

import concurrent.futures
import json
import pathlib
import pickle
import re
import threading

from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np

from jax_mgpu_ext import aot
from jax_mgpu_ext import targets
from jax_mgpu_ext._src import budget_kernel
from jax_mgpu_ext._src import kernel_calls
from jax_mgpu_ext._src.aot import dumps
from jax_mgpu_ext._src.aot import stand_in
from jax_mgpu_ext._src.aot import toolchain
from jax_mgpu_ext.kernels import cluster_ring
from jax_mgpu_ext.kernels import multicast_load
from jax_mgpu_ext.kernels import peer_exchange
from tests import aot_support
from tests import child
from tests import lowering

F32 = jnp.float32


def array(*shape, dtype=F32):
  return jax.ShapeDtypeStruct(shape or (128,), dtype)


def copy_kernel(scale=1.0, name=None, size=128):
  def body(x, o):
    o[...] = x[...] * scale
  body.__name__ = name or "copy"
  return plgpu.kernel(body, out_type=array(size))


@aot_support.needs_compiler
class CompileTest(aot_support.CompilingTestCase):

  @parameterized.product(
      module=(cluster_ring, multicast_load, peer_exchange),
      target=("h100", "b200"),
  )
  def test_shipped_kernels(self, module, target):
    inputs = module.make_inputs(np.random.default_rng(0))
    code = aot.compile_kernel(module.make_kernel(), *inputs, target=target)
    [kernel] = code.kernels
    self.assertIn(f".target {targets.get(target).arch}", code.ptx)
    self.assertIn(f'"{targets.get(target).arch}"', code.sass.replace("\t", "")
                  .replace(".target", '"') + f'"{targets.get(target).arch}"')
    self.assertFalse(code.cached)
    self.assertEqual(code.cluster, (2, 1, 1))
    self.assertEqual(code.spill_bytes, 0)
    self.assertBetween(code.registers, 16, 255)
    self.assertGreater(code.blocks_per_sm, 0)
    self.assertEqual(code.smem_bytes, code.resources[0].smem_bytes)
    self.assertEqual(
        code.mbarriers, sum(
            np.prod(row.shape, dtype=int)
            for row in code.resources[0].rows if "barrier" in row.kind
        ),
    )
    counts = code.class_counts()
    self.assertGreater(counts["cluster_barrier"], 0)
    self.assertGreater(counts["mbarrier_wait"], 0)
    if module is not peer_exchange:
      aot.assert_contains(code, "UTMALDG.*MULTICAST")
      self.assertGreater(counts["tma_load_multicast"], 0)
    aot.assert_lacks(code, "HGMMA")
    self.assertIn("gpu.launch", kernel.mlir)
    self.assertIn(kernel.name, kernel.mlir)
    self.assertIn("mosaic_gpu", code.xla)
    self.assertGreater(code.compile_s, 0)
    document = json.loads(json.dumps(code.to_json()))
    self.assertEqual(document["registers"], code.registers)
    self.assertNotIn("ptx", document["kernels"][0])
    self.assertEqual(
        code.to_json(texts=True)["kernels"][0]["ptx"], kernel.ptx
    )

  def test_source_lines(self):
    code = aot.compile_kernel(copy_kernel(), array(), sass=False)
    lines = {i.source for i in code.kernels[0].assembly().instructions()}
    self.assertTrue(any(
        line and line.file.endswith("aot_test.py") for line in lines
    ), lines)

  def test_static_arguments_keywords_and_weak_types(self):
    def scaled(x, y, *, scale):
      return copy_kernel(scale)(x + y)
    jitted = jax.jit(scaled, static_argnames="scale")
    code = aot.compile_kernel(jitted, array(), 2.0, scale=3.0, sass=False)
    other = aot.compile_kernel(jitted, array(), 2.0, scale=4.0, sass=False)
    self.assertTrue(aot.diff(
        code.kernels[0].assembly(), other.kernels[0].assembly()
    ))

  def test_arrays_of_any_place_and_type(self):
    kernel = copy_kernel()
    codes = [
        aot.compile_kernel(kernel, x, sass=False)
        for x in (
            array(), np.zeros(128, np.float64), np.zeros(128, np.float32),
            jnp.zeros(128), jax.device_put(jnp.zeros(128), jax.devices()[0]),
        )
    ]
    for code in codes:
      aot.assert_same_code(code, codes[0])

  def test_several_kernels(self):
    def program(x):
      return copy_kernel(2.0, "twice")(copy_kernel(3.0, "thrice")(x))
    code = aot.compile_kernel(program, array())
    self.assertCountEqual(
        [kernel.name for kernel in code.kernels], ["twice", "thrice"]
    )
    self.assertLen(code.resources, 2)
    for kernel in code.kernels:
      self.assertIn(f"{kernel.name}_mosaic_gpu", kernel.ptx)
      self.assertIn(f"{kernel.name}_mosaic_gpu", kernel.sass)

  def test_two_kernels_of_one_name(self):
    def program(x):
      return copy_kernel(3.0)(copy_kernel(5.0)(x))
    code = aot.compile_kernel(program, array())
    self.assertLen(code.kernels, 2)
    # Each has its own machine code: 3.0 and 5.0 as immediates.
    for kernel in code.kernels:
      [bits] = re.findall(r"0f40[4A]00000", kernel.ptx)
      number = {"0f40400000": 3, "0f40A00000": 5}[bits]
      self.assertRegex(kernel.sass, rf"FMUL \S+ \S+ {number} ")

  def test_kernels_of_one_name_in_branches(self):
    # JAX 0.11 numbers them in another order than it compiles them.
    def program(x):
      return lax.cond(x[0] > 0, copy_kernel(3.0), copy_kernel(5.0), x)
    code = aot.compile_kernel(program, array(), cache=False)
    self.assertLen(code.kernels, 2)
    for kernel in code.kernels:
      [bits] = re.findall(r"0f40[4A]00000", kernel.ptx)
      number = {"0f40400000": 3, "0f40A00000": 5}[bits]
      self.assertRegex(kernel.sass, rf"FMUL \S+ \S+ {number} ")

  def test_many_workers_that_know_a_kernel(self):
    kernel = copy_kernel(11.0)
    rows = aot.sweep(
        {i: (kernel, (array(),)) for i in range(6)}, jobs=4, cache=False,
        sass=False,
    )
    self.assertEqual({row.state for row in rows}, {"fits"})
    self.assertGreater(aot.compile_kernel(
        kernel, array(), cache=False, sass=False
    ).registers, 0)

  def test_64_bits(self):
    def body(x, o):
      o[...] = x[...]
    def program(x, y):
      kernel = plgpu.kernel(body, out_type=array())
      return kernel(x) + y.astype(F32)
    with jax.experimental.enable_x64() if hasattr(
        jax.experimental, "enable_x64"
    ) else jax.enable_x64(True):
      code = aot.compile_kernel(
          program, array(), np.zeros(128, np.float64), sass=False
      )
    self.assertIn("f64", code.xla)

  def test_static_numbers_of_numpy(self):
    seen = []
    def scaled(x, scale):
      seen.append(type(scale))
      return copy_kernel(float(scale))(x)
    jitted = jax.jit(scaled, static_argnums=1)
    aot.compile_kernel(jitted, array(), np.int32(4), sass=False)
    self.assertEqual(set(seen), {np.int32})

  def test_words_of_a_path_are_no_kernel(self):
    def mosaic_gpu_v2(x):
      return x + 1
    with self.assertRaises(aot.NoKernelError):
      aot.compile_kernel(mosaic_gpu_v2, array())

  def test_bad_limits(self):
    for limits in (
        dict(timeout_s=0), dict(timeout_s=float("nan")), dict(timeout_s="5"),
        dict(timeout_s=None), dict(timeout_s=float("inf")),
        dict(memory_limit_bytes=0), dict(memory_limit_bytes=-1),
        dict(memory_limit_bytes=1.5), dict(memory_limit_bytes=10**30),
    ):
      [name] = limits
      with self.assertRaisesRegex(ValueError, f"expected a positive.*{name}="):
        aot.compile_kernel(copy_kernel(), array(), **limits)

  def test_a_kernel_that_a_worker_knows(self):
    kernel = copy_kernel(5.0)
    first = aot.compile_kernel(kernel, array(), cache=False)
    again = aot.compile_kernel(kernel, array(), cache=False)
    inside = aot.compile_kernel(lambda x: kernel(x) + 1, array(), cache=False)
    for code in (again, inside):
      aot.assert_same_code(code, first)
      self.assertEqual(code.sass.count("/*0000*/"), 1)

  def test_pallas_call(self):
    def body(x, o):
      o[...] = x[...] + 1
    kernel = pl.pallas_call(
        body, out_shape=array(),
        compiler_params=plgpu.CompilerParams(),
    )
    if lowering.version() >= (0, 11):
      self.skipTest("JAX lowers pallas_call for Mosaic GPU no more")
    code = aot.compile_kernel(kernel, array(), sass=False)
    self.assertEqual(code.resources, ())
    self.assertGreater(code.registers, 0)

  def test_targets_at_a_time(self):
    found = aot.compile_for(
        copy_kernel(7.0), array(), targets=("h100", "b200", "rtx_pro_6000"),
        sass=False,
    )
    self.assertEqual(list(found), ["h100", "b200", "rtx_pro_6000"])
    for name, code in found.items():
      self.assertIn(f".target {targets.get(name).arch}", code.ptx)

  def test_threads(self):
    kernel = [copy_kernel(float(i), size=128 * (i + 1)) for i in range(6)]
    def compile_one(i):
      return aot.compile_kernel(
          kernel[i], array(128 * (i + 1)), target=("h100", "b200")[i % 2],
          sass=False,
      )
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
      codes = list(pool.map(compile_one, range(6)))
    for i, code in enumerate(codes):
      arch = ("sm_90a", "sm_100a")[i % 2]
      self.assertIn(f".target {arch}", code.ptx)

  def test_target_of_a_file(self):
    path = pathlib.Path(self.cache_dir) / "mine.toml"
    path.write_text(
        '[targets.h20]\nbased_on = "h100"\nsm_count = 78\n', encoding="utf-8"
    )
    seen = []
    def body(x, o):
      seen.append(jax.local_devices()[0].core_count)
      o[...] = x[...]
    kernel = plgpu.kernel(body, out_type=array())
    code = aot.compile_kernel(kernel, array(), target=f"{path}::h20", sass=False)
    self.assertEqual(code.target.name, "h20")
    self.assertEqual(set(seen), {78})

  def test_what_is_no_kernel(self):
    def build():
      return copy_kernel()
    for fn, says in (
        (build, "if it builds the kernel, call it first"),
        (lambda x: x + 1, "which calls none: pass the function"),
    ):
      arguments = () if fn is build else (array(),)
      with self.assertRaisesRegex(aot.NoKernelError, says):
        aot.compile_kernel(fn, *arguments)
    traced = jax.jit(copy_kernel()).trace(array())
    for fn in (traced, 7, traced.lower(lowering_platforms=("cuda",))):
      with self.assertRaisesRegex(TypeError, "expected a function"):
        aot.compile_kernel(fn, array())

  def test_targets_of_one_name(self):
    path = pathlib.Path(self.cache_dir) / "mine.toml"
    path.write_text(
        '[targets.h100]\nbased_on = "h100"\nsm_count = 78\n', encoding="utf-8"
    )
    kernel = copy_kernel()
    for names, says in (
        (("h100", f"{path}::h100"), "two different targets are called 'h100'"),
        ((), "at least one target"),
        ("h101", "did you mean h100"),
    ):
      with self.assertRaisesRegex(targets.TargetError, says):
        aot.compile_for(kernel, array(), targets=names)
    [only] = aot.compile_for(
        kernel, array(), targets=("h100", "h100"), sass=False
    ).values()
    self.assertEqual(only.target.name, "h100")
    self.assertLen(aot.compile_for(
        kernel, array(), targets="b200", sass=False
    ), 1)

  def test_budget_knows_the_registers(self):
    code = aot.compile_kernel(
        cluster_ring.make_kernel(num_stages=1),
        *cluster_ring.make_inputs(np.random.default_rng(0)), target="b200",
    )
    [found] = code.resources
    self.assertEqual(found.blocks_per_sm, code.blocks_per_sm)
    self.assertEqual(found.limited_by, "registers")

  def test_pickle(self):
    code = aot.compile_kernel(copy_kernel(), array())
    self.assertEqual(pickle.loads(pickle.dumps(code)).ptx, code.ptx)

  def test_tensor_cores(self):
    def body(a, b, o):
      def scope(a_smem, b_smem, acc, done):
        plgpu.copy_gmem_to_smem(a, a_smem, done)
        plgpu.copy_gmem_to_smem(b, b_smem, done)
        plgpu.barrier_wait(done)
        plgpu.wgmma(acc, a_smem, b_smem)
        o[...] = acc[...]
      tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
      pl.run_scoped(
          scope,
          plgpu.SMEM((64, 64), jnp.float16, transforms=tiled),
          plgpu.SMEM((64, 64), jnp.float16, transforms=tiled),
          plgpu.ACC((64, 64)),
          plgpu.Barrier(num_arrivals=2, num_barriers=()),
      )
    kernel = plgpu.kernel(body, out_type=array(64, 64))
    half = array(64, 64, dtype=jnp.float16)
    code = aot.compile_kernel(kernel, half, half)
    self.assertGreater(code.class_counts()["wgmma"], 0)
    aot.assert_contains(code, "HGMMA")
    self.assertEqual(code.resources[0].registers_per_thread, 32)
    # And on Blackwell it is refused, before the compiler dies.
    with self.assertRaisesRegex(ValueError, r"wgmma.*\[MGPU107\]"):
      aot.compile_kernel(kernel, half, half, target="b200")


@aot_support.needs_compiler
class StandInTest(aot_support.CompilingTestCase):
  """While a kernel is traced, the target is the only GPU; and only then."""

  def test_what_a_kernel_sees(self):
    seen = {}
    def body(x, o):
      [device] = jax.devices()
      seen[device.compute_capability] = (
          device.core_count, jax.local_devices() == [device],
          jax.device_count(), jax.default_backend(),
          jax.devices("cpu")[0].platform,
      )
      o[...] = x[...]
    kernel = plgpu.kernel(body, out_type=array())
    for target in ("h100", "b200", "h100", "rtx_pro_6000"):
      aot.compile_kernel(kernel, array(), target=target, sass=False)
    self.assertEqual(seen, {
        "9.0": (132, True, 1, "gpu", "cpu"),
        "10.0": (148, True, 1, "gpu", "cpu"),
        "12.0": (188, True, 1, "gpu", "cpu"),
    })

  def test_nothing_stays(self):
    names = ("devices", "local_devices", "device_count", "default_backend")
    before = {name: getattr(jax, name) for name in names}
    aot.compile_kernel(copy_kernel(9.0), array(), sass=False)
    def fails(x):
      raise KeyError("no kernel")
    with self.assertRaises(KeyError):
      aot.compile_kernel(fails, array())
    for name, function in before.items():
      self.assertIs(getattr(jax, name), function)
    self.assertEqual(jnp.zeros(3).devices().pop().platform, "cpu")

  def test_other_threads_see_the_machine(self):
    device = toolchain.device(targets.get("h100").xla_target_config())
    inside, done = threading.Event(), threading.Event()
    def trace():
      with stand_in.device(device):
        inside.set()
        done.wait(60)
    thread = threading.Thread(target=trace)
    thread.start()
    self.assertTrue(inside.wait(60))
    try:
      self.assertEqual(jax.devices()[0].platform, "cpu")
      self.assertEqual(jax.default_backend(), "cpu")
    finally:
      done.set()
      thread.join()

  def test_a_program_runs_as_before(self):
    # Neither the choice of a backend nor a compiled function is disturbed.
    output = child.check_output("""
        import jax
        import jax.numpy as jnp
        from jax.experimental.pallas import mosaic_gpu as plgpu
        from jax_mgpu_ext import aot
        @jax.jit
        def twice(x):
          return 2 * x
        print(twice(jnp.ones(3)).sum())
        def copy(x, o):
          o[...] = x[...]
        x = jax.ShapeDtypeStruct((128,), jnp.float32)
        kernel = plgpu.kernel(copy, out_type=x)
        print(aot.compile_kernel(kernel, x, cache=False).registers > 0)
        print(twice(jnp.ones(3)).sum(), jax.default_backend())
        print(twice._cache_size())
    """, env={"JAX_MGPU_EXT": "strict"})
    self.assertEqual(output, "6.0\nTrue\n6.0 cpu\n1\n")

  def test_jax_was_not_told_its_platform(self):
    # Then the plugin, without libraries to run with, does not register itself.
    code = """
        import jax
        import jax.numpy as jnp
        from jax.experimental.pallas import mosaic_gpu as plgpu
        from jax_mgpu_ext import aot
        def copy(x, o):
          o[...] = x[...]
        x = jax.ShapeDtypeStruct((128,), jnp.float32)
        kernel = plgpu.kernel(copy, out_type=x)
        code = aot.compile_kernel(kernel, x, cache=False, sass=False)
        print(code.target.name, jax.devices()[0].platform)
    """
    output = child.check_output(code, env={"JAX_PLATFORMS": ""})
    self.assertRegex(output, r"h100 (cpu|gpu)\n$")


@aot_support.needs_compiler
class SameCodeTest(aot_support.CompilingTestCase):

  def test_resources_of_compiled_kernels(self):
    """The budget says what the launch asks for."""
    def body(x, o, *refs):
      o[...] = x[...]
      def scope(more):
        more[...] = x[...]
        o[...] = more[...] + jnp.sum(x[...])
      pl.run_scoped(scope, plgpu.SMEM((128,), F32))
    trees = [
        (),
        (plgpu.SMEM((100,), jnp.int8),),
        (plgpu.SMEM((3, 100), jnp.float16), plgpu.Barrier(num_barriers=3)),
        (plgpu.RefUnion(
            plgpu.SMEM((8, 128), F32), [plgpu.SMEM((64,), jnp.bfloat16)] * 3
        ), plgpu.Barrier(num_barriers=())),
    ]
    for tree in trees:
      kernel = plgpu.kernel(body, out_type=array(), scratch_types=tree)
      code = aot.compile_kernel(kernel, array(), sass=False)
      traced = jax.jit(kernel).trace(array())
      [call] = kernel_calls.find(traced.jaxpr)
      found = budget_kernel.budget_kernel(call, "h100")
      self.assertEqual(found.smem_bytes, code.smem_bytes, tree)

  def test_hooks_make_no_difference(self):
    program = """
        import sys
        from jax_mgpu_ext import aot
        from jax_mgpu_ext.kernels import cluster_ring
        import numpy as np
        kernel = cluster_ring.make_kernel()
        inputs = cluster_ring.make_inputs(np.random.default_rng(0))
        code = aot.compile_kernel(kernel, *inputs, target=sys.argv[1],
                                  cache=False, sass=False)
        print(code.ptx)
    """
    for target in ("h100", "b200"):
      on, off = (
          child.check_output(program, target, env={"JAX_MGPU_EXT": mode})
          for mode in ("strict", "off")
      )
      self.assertEqual(on, off)
      aot.assert_same_code(on, off)

  def test_a_difference_would_show(self):
    ring = cluster_ring.make_inputs(np.random.default_rng(0))
    codes = [
        aot.compile_kernel(
            cluster_ring.make_kernel(num_stages=stages), *ring, sass=False
        )
        for stages in (2, 3)
    ]
    with self.assertRaisesRegex(AssertionError, r"[-+]"):
      aot.assert_same_code(*codes)


class DumpsTest(parameterized.TestCase):
  """Reading what Mosaic writes."""

  def test_log(self):
    found = dumps.read_log(
        "ptxas info    : 0 bytes gmem\n"
        "ptxas info    : Compiling entry function 'k' for 'sm_90a'\n"
        "ptxas info    : (C7519) warpgroup.arrive is injected\n"
        "ptxas warning : Registers are spilled to local memory in 'k'\n"
        "ptxas info    : Function properties for k\n"
        "    24 bytes stack frame, 20 bytes spill stores, 40 bytes spill loads\n"
        "ptxas info    : Used 168 registers, used 16 barriers, 1 bytes smem\n"
    )
    self.assertEqual(found["registers"], 168)
    self.assertEqual(
        (found["stack_bytes"], found["spill_store_bytes"],
         found["spill_load_bytes"], found["static_smem_bytes"]),
        (24, 20, 40, 1),
    )
    self.assertLen(found["warnings"], 2)

  @parameterized.parameters("", "ptxas info : 0 bytes gmem", "Used 3 registers")
  def test_bad_log(self, text):
    with self.assertRaisesRegex(dumps.DumpError, "registers and spills"):
      dumps.read_log(text)

  @parameterized.parameters(
      "", "// -----// IR Dump Before X\nmodule {}\n",
      "// -----// IR Dump Before X\n gpu.launch_func @k blocks in (%a, %b, %c)"
      " threads in (%d, %e, %f)\n",
  )
  def test_bad_launch(self, text):
    with self.assertRaises(dumps.DumpError):
      dumps.read_launch(text)

  def test_launch(self):
    found = dumps.read_launch(
        "// -----// IR Dump Before X\n"
        "  %c2 = arith.constant 2 : index\n  %c1 = arith.constant 1 : index\n"
        "  %c128 = arith.constant 128 : index\n"
        "  %s = arith.constant 2056 : i32\n"
        "  gpu.launch_func async [%t] @k::@k clusters in (%c2, %c1, %c1)"
        " blocks in (%c2, %c1, %c1) threads in (%c128, %c1, %c1)"
        "  dynamic_shared_memory_size %s args(%x : !llvm.ptr)\n"
    )
    self.assertEqual(found, dict(
        grid=(2, 1, 1), cluster=(2, 1, 1), block=(128, 1, 1),
        dynamic_smem_bytes=2056,
    ))


if __name__ == "__main__":
  absltest.main()
