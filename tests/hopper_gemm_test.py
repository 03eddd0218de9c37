"""Tests of the Hopper GEMM: values, races, and the code of both versions."""

from __future__ import annotations

import ast
import io
import tokenize

from absl.testing import absltest
from absl.testing import parameterized
import hypothesis
from hypothesis import strategies
import jax
import jax.numpy as jnp
import numpy as np

from jax._src.pallas.mosaic_gpu.interpret import shared_memory
from jax.experimental.pallas.ops.gpu import hopper_matmul_mgpu

from jax_mgpu_ext import aot
from jax_mgpu_ext import avals
from jax_mgpu_ext import budget
from jax_mgpu_ext import specs
from jax_mgpu_ext._src import check_interpreter
from jax_mgpu_ext._src.aot import opcode_classes
from jax_mgpu_ext.kernels import hopper_gemm
from jax_mgpu_ext.kernels.by_hand import hopper_gemm as by_hand
from jax_mgpu_ext.kernels.gemm_tiles import GemmConfig
from tests import aot_support

_VERSIONS = dict(specs=hopper_gemm, by_hand=by_hand)
# JAX 0.10.2 has none in its interpreter; a kernel that needs them fails there,
# and those that come after it in the same process hang.
_HAS_CLUSTER_BARRIERS = hasattr(shared_memory, "ClusterBarrier")
# The interpreter of 0.10.2 cannot.
_TRANSPOSES = jax.__version_info__ >= (0, 11)
# Since 0.12 a kernel may end with completions that nobody has waited for.
_IGNORES_TAILS = jax.__version_info__ >= (0, 12)
# In releases before 0.11 the failure of one thread leaves the others waiting.
_ENDS_WITH_FAILURES = jax.__version_info__ >= (0, 11)
# The smallest tiles of float16: 64 rows for wgmma, and rows of 32 bytes, which
# are the smallest swizzle.
_TINY = dict(
    tile_m=64, tile_n=16, tile_k=16, epilogue_tile_m=64, epilogue_tile_n=16
)
_CLUSTERS = (("alone", None), ("cluster_m", "m"), ("cluster_n", "n"))
_SETTINGS = hypothesis.settings(
    max_examples=8, deadline=None, derandomize=True, database=None
)
# A pair of stages and steps for each way in which a ring can end.
_RINGS = [
    (stages, steps)
    for stages in (1, 2, 3, 4)
    for steps in (1, stages - 1, stages, stages + 1, 3 * stages + 2)
    if steps
]


def _problem(config, *, tiles=(1, 1), steps, **kwargs):
  """Returns the arguments for so many tiles of a cluster, and steps a tile."""
  cluster_m, cluster_n = config.cluster_tile
  return dict(
      m=tiles[0] * cluster_m, n=tiles[1] * cluster_n, k=steps * config.tile_k,
      config=config, **kwargs,
  )


def _for_inputs(problem):
  taken = ("m", "n", "k", "dtype", "b_k_major")
  return {key: problem[key] for key in taken if key in problem}


def _for_reference(problem):
  taken = ("out_dtype", "b_k_major")
  return {key: problem[key] for key in taken if key in problem}


def _shapes(problem):
  inputs = hopper_gemm.make_inputs(
      np.random.default_rng(0), **_for_inputs(problem)
  )
  return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs]


class InterpretingTestCase(parameterized.TestCase):

  def check(self, problem, version="specs"):
    """The kernel is right and free of races in interpret mode."""
    if problem["config"].cluster_size > 1 and not _HAS_CLUSTER_BARRIERS:
      self.skipTest(
          f"the interpreter of JAX {jax.__version__} has no cluster barriers"
      )
    if problem.get("b_k_major") and not _TRANSPOSES:
      self.skipTest(
          f"the interpreter of JAX {jax.__version__} cannot transpose refs"
      )
    inputs = hopper_gemm.make_inputs(
        np.random.default_rng(1), **_for_inputs(problem)
    )
    kernel = _VERSIONS[version].make_kernel(
        interpret=check_interpreter.parameters(detect_races=True), **problem
    )
    with check_interpreter.Watch() as watch:
      try:
        got = np.asarray(kernel(*inputs))
      except Exception as error:
        raise watch.cause(error) from error
      self.assertIsNone(watch.race())
    want = hopper_gemm.reference(*inputs, **_for_reference(problem))
    self.assertEqual(got.dtype, want.dtype)
    np.testing.assert_array_equal(
        got.astype(np.float32), want.astype(np.float32)
    )


class InterpretTest(InterpretingTestCase):

  @parameterized.named_parameters(*_CLUSTERS)
  @_SETTINGS
  @hypothesis.given(
      ring=strategies.sampled_from(_RINGS),
      wg_dimension=strategies.sampled_from("mn"),
      tiles=strategies.sampled_from([(1, 1), (2, 1), (1, 3)]),
      version=strategies.sampled_from(sorted(_VERSIONS)),
  )
  def test_every_end_of_the_ring(
      self, cluster_dimension, ring, wg_dimension, tiles, version
  ):
    num_stages, steps = ring
    config = GemmConfig(
        num_stages=num_stages, wg_dimension=wg_dimension,
        cluster_dimension=cluster_dimension, **_TINY,
    )
    # One cluster for all tiles: the ring goes on from tile to tile.
    self.check(
        _problem(config, tiles=tiles, steps=steps, num_clusters=1), version
    )

  @parameterized.product(
      num_clusters=(None, 5), grid_minor_dim=("m", "n"), width=(1, 2)
  )
  def test_every_tile_is_computed(self, num_clusters, grid_minor_dim, width):
    config = GemmConfig(
        num_stages=2, grid_minor_dim=grid_minor_dim, grid_tile_width=width,
        **_TINY,
    )
    self.check(
        _problem(config, tiles=(2, 3), steps=2, num_clusters=num_clusters)
    )

  @parameterized.product(
      dtype=(jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2),
      version=tuple(_VERSIONS),
  )
  def test_types(self, dtype, version):
    config = GemmConfig(num_stages=2, **_TINY | dict(tile_k=32))
    self.check(
        _problem(config, steps=3, dtype=dtype, b_k_major=True), version
    )
    self.check(_problem(
        config, steps=3, dtype=dtype, b_k_major=True, out_dtype=jnp.float32
    ))

  @parameterized.parameters((64, 16), (128, 8), (64, 24), (None, None))
  def test_parts_of_the_output(self, part_m, part_n):
    # 6, 6, 4 and 1 of them, in one or two places.
    config = GemmConfig(
        tile_m=128, tile_n=48, tile_k=16, num_stages=2,
        epilogue_tile_m=part_m, epilogue_tile_n=part_n,
    )
    self.check(_problem(config, tiles=(1, 2), steps=1, num_clusters=1))


class ProtocolTest(InterpretingTestCase):
  """Each part of the protocol is needed: without it, the kernel fails.

  Without a release it would wait for ever. The twin of all is InterpretTest.
  """

  @parameterized.product(
      part=("producer_acquire", "producer_tail", "consumer_wait"),
      cluster_dimension=(None, "m", "n"),
  )
  def test_wait(self, part, cluster_dimension):
    if part == "producer_tail" and _IGNORES_TAILS:
      self.skipTest(
          f"the interpreter of JAX {jax.__version__} lets a kernel end with"
          " completions that nobody has waited for"
      )
    if not _ENDS_WITH_FAILURES:
      self.skipTest(
          f"in the interpreter of JAX {jax.__version__} the failure of one"
          " thread leaves the others waiting"
      )
    without = dict(
        producer_acquire=lambda ring, step: None,
        producer_tail=lambda ring, num_steps: None,
        consumer_wait=lambda ring, step: ring.stage(step),
    )
    config = GemmConfig(
        num_stages=2, cluster_dimension=cluster_dimension, **_TINY
    )
    with absltest.mock.patch.object(specs.RingBuffer, part, without[part]):
      with self.assertRaises(Exception) as caught:
        self.check(_problem(config, steps=5, num_clusters=1))
    if isinstance(caught.exception, absltest.SkipTest):
      raise caught.exception
    self.assertRegex(
        str(caught.exception), "RACE|observ|phase|completed|AssertionError|race"
    )


class ArgumentsTest(parameterized.TestCase):

  @parameterized.parameters(
      (dict(tile_m=32), "tile_m in multiples of 64, got tile_m=32"),
      (dict(tile_n=12), "tile_n in multiples of 8, at most 256, got tile_n=12"),
      (dict(tile_n=264), "at most 256, got tile_n=264"),
      (dict(tile_k=0), "tile_k to be at least 1"),
      (dict(num_stages=0), "num_stages to be at least 1"),
      (dict(num_stages=33), "at most 32 stages, got num_stages=33"),
      (dict(num_stages=2.0), "num_stages=2.0"),
      (dict(epilogue_tile_m=0), "epilogue_tile_m to be at least 1"),
      (dict(epilogue_tile_m=32), "epilogue_tile_m in multiples of 64"),
      (dict(epilogue_tile_n=48), "divide tile_n=128, got epilogue_tile_n=48"),
      (dict(grid_tile_width=0), "grid_tile_width to be at least 1"),
      (dict(grid_minor_dim="k"), "'m' or 'n', got grid_minor_dim='k'"),
      (dict(wg_dimension=None), "'m' or 'n', got wg_dimension=None"),
      (dict(cluster_dimension=2), "'m' or 'n', got cluster_dimension=2"),
  )
  def test_bad_configuration(self, wrong, says):
    with self.assertRaisesRegex(ValueError, says):
      GemmConfig(**wrong)

  @parameterized.product(
      version=tuple(_VERSIONS),
      case=(
          (dict(m=0), "m to be at least 1"),
          (dict(m=192), "m to be a multiple of 128, .*got m=192"),
          (dict(n=128), "n to be a multiple of 256, .*got n=128"),
          (dict(k=96), "k to be a multiple of 64, .*got k=96"),
          (dict(dtype=jnp.float32), "float8_e5m2, got dtype=float32"),
          (dict(out_dtype=jnp.int32), "float32, got out_dtype=int32"),
          (dict(dtype=jnp.float8_e5m2), "b_k_major=True, since wgmma"),
          (dict(num_clusters=0), "num_clusters to be at least 1"),
          (dict(num_clusters=33), "as many clusters as tiles, 32, got"),
          (dict(config=GemmConfig(tile_k=8)), "tile_k in multiples of 16"),
          (
              dict(config=GemmConfig(tile_n=32, epilogue_tile_n=32)),
              "tile_n in multiples of 64, as tile_k=64 makes rows of 128",
          ),
      ),
  )
  def test_bad_problem(self, version, case):
    wrong, says = case
    with self.assertRaisesRegex(ValueError, says):
      _VERSIONS[version].make_kernel(**wrong)

  def test_good(self):
    config = GemmConfig(tile_m=128, tile_n=192, epilogue_tile_n=None)
    self.assertEqual(config.block_tile, (128, 384))
    self.assertEqual(config.cluster_tile, (128, 384))
    self.assertEqual(config.epilogue_tile_n, 192)
    self.assertEqual(config.num_parts, 2)
    wide = GemmConfig(cluster_dimension="n", wg_dimension="m")
    self.assertEqual(wide.cluster_tile, (256, 256))
    self.assertEqual(wide.cluster_size, 2)
    for module in _VERSIONS.values():
      module.make_kernel(num_clusters=32)
      module.make_kernel(
          config=GemmConfig(tile_n=32, epilogue_tile_n=32), b_k_major=True
      )

  @parameterized.parameters(*_VERSIONS)
  def test_every_spec_has_an_aval(self, version):
    tree = _VERSIONS[version].specs(config=GemmConfig(cluster_dimension="m"))
    self.assertLen(jax.tree.leaves(avals.ref_avals(tree)), 5)

  def test_largest_number_of_stages(self):
    for config, most in ((GemmConfig(), 4), (GemmConfig(tile_n=64), 6)):
      found = [
          stages for stages in range(1, 33)
          if budget.fits(
              hopper_gemm.specs(
                  config=GemmConfig(
                      tile_n=config.tile_n, num_stages=stages
                  )
              ),
              "h100",
          )
      ]
      self.assertEqual(max(found), most)


def _large(dtype, cluster_dimension, wg_dimension):
  """Returns a problem with more tiles than the GPU computes at a time."""
  one_byte = jnp.dtype(dtype).itemsize == 1
  config = GemmConfig(
      tile_k=128 if one_byte else 64, cluster_dimension=cluster_dimension,
      wg_dimension=wg_dimension, grid_tile_width=8,
  )
  return dict(
      m=4096, n=4096, k=1024, dtype=dtype, config=config, b_k_major=one_byte
  )


def _compile(version, problem, target="h100"):
  return aot.compile_kernel(
      _VERSIONS[version].make_kernel(**problem), *_shapes(problem),
      target=target, sass=False,
  )


@aot_support.needs_compiler
class CompiledTest(aot_support.CompilingTestCase):

  def check_same(self, problem, target="h100"):
    ours, twin = (_compile(name, problem, target) for name in _VERSIONS)
    aot.assert_same_code(ours, twin)
    self.assertEqual(ours.registers, twin.registers)
    self.assertEqual(ours.smem_bytes, twin.smem_bytes)
    self.assertEqual(ours.spill_bytes, 0)
    self.assertEqual(twin.spill_bytes, 0)
    for code in (ours, twin):
      [found] = code.resources
      self.assertTrue(found.fits)
      self.assertEqual(found.smem_bytes, code.smem_bytes)
    return ours

  @parameterized.product(
      dtype=(jnp.float16, jnp.bfloat16, jnp.float8_e4m3fn),
      cluster_dimension=(None, "m", "n"),
      wg_dimension=("m", "n"),
  )
  def test_same_code(self, dtype, cluster_dimension, wg_dimension):
    code = self.check_same(_large(dtype, cluster_dimension, wg_dimension))
    clustered = cluster_dimension is not None
    self.assertEqual(code.cluster_size, 2 if clustered else 1)
    self.assertEqual(code.class_counts()["tma_load_multicast"] > 0, clustered)

  def test_same_code_on_h200(self):
    self.check_same(_large(jnp.float8_e5m2, "m", "n"), "h200")

  @parameterized.parameters(
      dict(num_stages=1),
      dict(num_stages=3, grid_minor_dim="m", grid_tile_width=3),
      dict(tile_m=64, tile_n=256, epilogue_tile_n=None, num_stages=2),
      dict(tile_n=64, tile_k=32, epilogue_tile_n=8),
  )
  def test_same_code_of_other_configurations(self, **config):
    self.check_same(dict(
        m=1024, n=1024, k=256,
        config=GemmConfig(cluster_dimension="m", **config),
    ))

  def test_same_code_with_k_major_float16(self):
    self.check_same(dict(m=1024, n=1024, k=256, b_k_major=True))


# What a step costs, by class of instructions.
_PER_STEP = (
    "wgmma", "wgmma_sync", "tma_load", "tma_load_multicast", "mbarrier_wait",
    "mbarrier_arrive", "async_commit", "async_wait", "named_barrier", "fence",
    "fence_proxy",
)


def _main_loops(ptx):
  """Returns the classes of the instructions in the two loops over the steps.

  A loop goes from a label to the last branch back to it. That of the producer
  is the shortest one with a TMA load in it, that of a consumer the shortest one
  with a wgmma. (A wait for an mbarrier is a loop of its own, inside.)

  Args:
    ptx: PTX of one kernel.

  Returns:
    A dictionary of class -> count for the producer, and one for the consumer.
  """
  [function] = aot.parse_ptx(ptx).functions
  classes = [
      opcode_classes.opcode_class("ptx", instruction.text)
      for instruction in function.instructions
  ]
  ends = {}
  for index, instruction in enumerate(function.instructions):
    if instruction.opcode == "bra":
      label = instruction.operands.split()[-1]
      before = [
          i for i, name in function.labels if name == label and i <= index
      ]
      if before:
        ends[max(before)] = index
  loops = sorted(
      (classes[start : end + 1] for start, end in ends.items()), key=len
  )
  return tuple(
      {name: found.count(name) for name in _PER_STEP}
      for found in (
          next(loop for loop in loops if one_of.intersection(loop))
          for one_of in ({"tma_load", "tma_load_multicast"}, {"wgmma"})
      )
  )


@aot_support.needs_compiler
class AgainstJaxTest(aot_support.CompilingTestCase):
  """A step costs no more than in JAX's own Hopper GEMM, for the same tiles."""

  @parameterized.product(
      cluster_dimension=(None, "m", "n"), wg_dimension=("m", "n")
  )
  def test_instructions_of_a_step(self, cluster_dimension, wg_dimension):
    dtype = jnp.bfloat16 if wg_dimension == "m" else jnp.float16
    problem = _large(dtype, cluster_dimension, wg_dimension)
    config = problem["config"]
    dimensions = hopper_matmul_mgpu.MatmulDimension
    of_jax = lambda dim: None if dim is None else dimensions[dim.upper()]
    theirs = aot.compile_kernel(
        lambda a, b: hopper_matmul_mgpu.matmul(
            a, b, None,
            hopper_matmul_mgpu.TuningConfig(
                tile_m=config.tile_m, tile_n=config.tile_n,
                tile_k=config.tile_k,
                max_concurrent_steps=config.num_stages,
                epi_tile_m=config.epilogue_tile_m,
                epi_tile_n=config.epilogue_tile_n,
                grid_minor_dim=of_jax(config.grid_minor_dim),
                grid_tile_width=config.grid_tile_width,
                wg_dimension=of_jax(wg_dimension),
                cluster_dimension=of_jax(cluster_dimension),
            ),
        ),
        *_shapes(problem), target="h100", sass=False,
    )
    ours = _compile("specs", problem)
    for mine, other in zip(_main_loops(ours.ptx), _main_loops(theirs.ptx)):
      self.assertEqual(mine["wgmma"], other["wgmma"])
      for name in _PER_STEP:
        self.assertLessEqual(mine[name], other[name], name)
    self.assertLessEqual(ours.registers, theirs.registers)
    self.assertLessEqual(ours.smem_bytes, theirs.smem_bytes)
    self.assertEqual(ours.spill_bytes, 0)

  def test_loops_are_found(self):
    producer, consumer = _main_loops(
        _compile("specs", _large(jnp.float16, "m", "n")).ptx
    )
    # One copy of each operand; four wgmmas along the 64 of K, for each 64 of
    # the 128 rows.
    self.assertEqual(producer["tma_load"], 1)
    self.assertEqual(producer["tma_load_multicast"], 1)
    self.assertEqual(producer["wgmma"], 0)
    self.assertEqual(consumer["wgmma"], 8)
    self.assertEqual(consumer["mbarrier_wait"], 1)
    self.assertEqual(consumer["mbarrier_arrive"], 1)


# Names that stand for synchronization, and for the layout it needs of SMEM.
_SYNCHRONIZATION = frozenset((
    # Barriers: their specs, the refs, who waits and who arrives.
    "Barrier", "ClusterBarrier", "MaybeClusterBarrier", "RingBuffer",
    "full", "empty", "num_arrivals", "num_barriers", "num_producers",
    "num_consumers", "barrier_wait", "barrier_arrive", "producer_acquire",
    "producer_commit", "producer_tail", "consumer_wait", "consumer_release",
    # Which stage it is about.
    "rem",
    # Copies that arrive at a barrier, and blocks that share them.
    "copy_in", "copy_gmem_to_smem", "collective_axes",
    # Tiling and swizzle.
    "TiledSMEM", "transforms", "_transforms", "TilingTransform",
    "SwizzleTransform", "find_swizzle", "swizzle", "tiling",
))


def _synchronization_lines(module) -> int:
  """Counts the lines of a module that are code of synchronization.

  The rule: a line of the text counts, once, if one of the names on it is in
  `_SYNCHRONIZATION`. Comments and docstrings do not count, nor do imports, nor
  what is neither the specs nor the kernel: inputs, reference, cases. What both
  versions take from `gemm_tiles` is in neither count. The lines that such a
  line needs around it, as `@pl.when` and `def` around a wait, do not count.
  """
  with open(module.__file__, encoding="utf-8") as file:
    text = file.read()
  left_out = {"make_inputs", "reference"}
  lines = set()
  for node in ast.parse(text).body:
    if (
        isinstance(node, (ast.FunctionDef, ast.ClassDef))
        and node.name not in left_out
    ):
      lines.update(range(node.lineno, node.end_lineno + 1))
  return len({
      token.start[0]
      for token in tokenize.generate_tokens(io.StringIO(text).readline)
      if token.type == tokenize.NAME
      and token.string in _SYNCHRONIZATION
      and token.start[0] in lines
  })


class LinesTest(absltest.TestCase):

  def test_at_most_half_of_the_lines_by_hand(self):
    ours = _synchronization_lines(hopper_gemm)
    twin = _synchronization_lines(by_hand)
    self.assertGreater(ours, 8)  # The rule finds them.
    self.assertLessEqual(2 * ours, twin, f"{ours} lines, {twin} by hand")


if __name__ == "__main__":
  absltest.main()
