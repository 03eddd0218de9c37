"""The Blackwell GEMM, in both versions: values, races, and the same code."""

from __future__ import annotations

import inspect
import itertools
import re

from absl.testing import absltest
from absl.testing import parameterized
import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np

from jax_mgpu_ext import aot
from jax_mgpu_ext import budget
from jax_mgpu_ext._src import check_interpreter
from jax_mgpu_ext.kernels import blackwell_gemm
from jax_mgpu_ext.kernels import blackwell_tiles
from jax_mgpu_ext.kernels.by_hand import blackwell_gemm as by_hand
from tests import aot_support
from tests import lowering

GemmConfig = blackwell_tiles.GemmConfig
_SMALL = dict(collective=False, tile_n=32, tile_k=16, epilogue_tile_n=32)
_RACES = check_interpreter.parameters(detect_races=True)


def _interpret(module, *, m, n, k, dtype=jnp.float16, **arguments):
  """Returns inputs, output and the text of a race, or raises the cause."""
  problem = dict(m=m, n=n, k=k, dtype=dtype)
  inputs = blackwell_gemm.make_inputs(np.random.default_rng(0), **problem)
  kernel = module.make_kernel(interpret=_RACES, **problem, **arguments)
  with check_interpreter.Watch() as watch:
    try:
      output = np.asarray(kernel(*inputs))
    except Exception as error:  # pylint: disable=broad-exception-caught
      raise watch.cause(error) from error
    return inputs, output, watch.race()


class ValuesTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    if lowering.version() < (0, 11, 0):
      self.skipTest(
          f"the interpreter of JAX {jax.__version__} has no tensor memory"
      )

  def assert_right(
      self, *, k_steps, tiles=(1, 1), dtype=jnp.float16, module=blackwell_gemm,
      num_clusters=1, **arguments,
  ):
    config = GemmConfig(**{**_SMALL, **arguments})
    inputs, output, race = _interpret(
        module,
        m=tiles[0] * config.mma_m,
        n=tiles[1] * config.mma_n,
        k=k_steps * config.tile_k,
        dtype=dtype,
        config=config,
        num_clusters=min(num_clusters, tiles[0] * tiles[1]),
    )
    self.assertIsNone(race)
    np.testing.assert_array_equal(output, blackwell_gemm.reference(*inputs))

  @parameterized.parameters(1, 2, 3, 4)
  def test_step_counts(self, num_stages):
    counts = {1, num_stages - 1, num_stages, num_stages + 1, 3 * num_stages + 2}
    for k_steps in sorted(counts - {0}):
      with self.subTest(k_steps=k_steps):
        self.assert_right(num_stages=num_stages, k_steps=k_steps)

  @parameterized.product(num_accumulators=(1, 2, 3), num_clusters=(1, 2))
  def test_tile_counts(self, num_accumulators, num_clusters):
    self.assert_right(
        num_stages=2,
        k_steps=3,
        tiles=(2, 3),
        num_accumulators=num_accumulators,
        num_clusters=num_clusters,
    )

  @hypothesis.settings(derandomize=True, deadline=None, max_examples=8)
  @hypothesis.given(
      num_stages=st.integers(1, 4),
      k_steps=st.integers(1, 5),
      tiles=st.tuples(st.integers(1, 2), st.integers(1, 3)),
      num_accumulators=st.integers(1, 3),
      num_clusters=st.integers(1, 4),
      epilogue_tile_n=st.sampled_from((16, 32)),
      grid_minor_dim=st.sampled_from("mn"),
      grid_tile_width=st.integers(1, 2),
      dtype=st.sampled_from((jnp.float16, jnp.bfloat16)),
      module=st.sampled_from((blackwell_gemm, by_hand)),
  )
  def test_all_together(self, **arguments):
    self.assert_right(**arguments)

  @parameterized.parameters(blackwell_gemm, by_hand)
  def test_two_blocks_are_not_interpreted(self, module):
    """Once they are, they belong into the tests above."""
    config = GemmConfig(**{**_SMALL, "collective": True})
    why = "it can"
    try:
      _interpret(module, config=config, m=256, n=64, k=16)
    except Exception as error:  # pylint: disable=broad-exception-caught
      why = check_interpreter.unsupported(error)
    self.assertEqual(why, "collective_axis not supported yet")

  @parameterized.parameters(
      (blackwell_gemm.RingBuffer, "producer_acquire"),
      (blackwell_gemm.AccumulatorRing, "producer_acquire"),
      (blackwell_gemm.AccumulatorRing, "consumer_wait"),
      (blackwell_gemm.RingBuffer, "consumer_wait"),
  )
  def test_waits_are_needed(self, ring, name):
    without = ring.stage if name == "consumer_wait" else (
        lambda self, step: None
    )
    self.enter_context(absltest.mock.patch.object(ring, name, without))
    with self.assertRaisesRegex(
        Exception, "RACE|observ|phase|completed|not None"
    ):
      self.assert_right(num_stages=2, k_steps=3, tiles=(2, 2))


class TilesTest(parameterized.TestCase):

  @parameterized.product(
      sizes=((1, 1), (1, 5), (4, 3), (3, 5)),
      minor=("m", "n"),
      width=(1, 2, 8),
      clusters=(1, 2, 3),
  )
  def test_each_tile_once(self, sizes, minor, width, clusters):
    m, n = sizes
    clusters = min(clusters, m * n)
    tiles = blackwell_tiles.Tiles(m=m, n=n, k=1, clusters=clusters)
    config = GemmConfig(grid_minor_dim=minor, grid_tile_width=width)
    seen = []
    for cluster in map(jnp.int32, range(clusters)):
      for tile in range(int(tiles.of_cluster(cluster))):
        at = tiles.index(jnp.int32(tile), cluster, config)
        seen.append(tuple(map(int, at)))
    self.assertCountEqual(seen, itertools.product(range(m), range(n)))

  def test_goes_back_and_forth(self):
    tiles = blackwell_tiles.Tiles(m=3, n=4, k=1, clusters=1)
    config = GemmConfig(grid_minor_dim="n", grid_tile_width=2)
    found = [
        tuple(map(int, tiles.index(jnp.int32(tile), jnp.int32(0), config)))
        for tile in range(12)
    ]
    self.assertEqual(found, [
        (0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1),
        (2, 2), (2, 3), (1, 2), (1, 3), (0, 2), (0, 3),
    ])


class ArgumentsTest(parameterized.TestCase):

  @parameterized.parameters(
      (dict(tile_m=64), "tile_m to be 128"),
      (dict(tile_n=8), "tile_n=8"),
      (dict(tile_k=40), "tile_k=40"),
      (dict(num_stages=0), "num_stages=0"),
      (dict(num_accumulators=0), "num_accumulators=0"),
      (dict(tile_n=256), "at most 256 columns"),
      (dict(num_accumulators=3), "512 columns together"),
      (dict(epilogue_tile_n=96), "to divide 256"),
      (dict(grid_minor_dim="k"), "grid_minor_dim=k"),
      (dict(grid_tile_width=0), "grid_tile_width=0"),
  )
  def test_config(self, arguments, says):
    with self.assertRaisesRegex(ValueError, says):
      GemmConfig(**arguments)

  @parameterized.product(
      module=(blackwell_gemm, by_hand),
      case=(
          (dict(n=128), "n to be a multiple of 256, got n=128"),
          (dict(m=128), "m to be a multiple of 256, got m=128"),
          (dict(k=32), "k to be a multiple of 64, got k=32"),
          (dict(k=0), "k=0"),
          (dict(m=256.0), "m=256.0"),
          (dict(dtype=jnp.float32), "dtype=float32"),
          (dict(num_clusters=0), "num_clusters=0"),
          (dict(num_clusters=17), "each of the 16 tiles, got num_clusters=17"),
      ),
  )
  def test_problem(self, module, case):
    arguments, says = case
    with self.assertRaisesRegex(ValueError, says):
      module.make_kernel(**arguments)


class SynchronizationTest(absltest.TestCase):

  def test_is_less_to_write(self):
    spec, hand = map(_lines, (blackwell_gemm, by_hand))
    self.assertGreater(spec, 10)
    self.assertLess(2 * spec, hand)


def _lines(module) -> int:
  """Counts the lines that have to do with barriers and stages."""
  words = re.compile(
      r"Barrier|barrier_|num_arrivals|num_barriers|orders_tensor_core"
      r"|commit_arrive|wait_load_tmem|lax\.rem|lax\.max|_acquire|_tail|_tracked"
      r"|PARTITIONED|collective_ax|stage|full|empty"
      r"|\bring\.|\bacc\.|RingBuffer|AccumulatorRing"
  )
  text = "".join(map(inspect.getsource, (module.specs, module.make_kernel)))
  text = re.sub('"""(.|\n)*?"""|#.*', "", text)
  return sum(bool(words.search(line)) for line in text.splitlines())


_PROBLEMS = {
    "two_blocks": dict(m=4096, n=4096, k=1024),
    "two_blocks_narrow": dict(
        m=512, n=512, k=320,
        config=GemmConfig(
            tile_n=64, num_stages=6, num_accumulators=3, epilogue_tile_n=128
        ),
    ),
    "one_block": dict(
        m=4096, n=4096, k=1024,
        config=GemmConfig(
            collective=False, tile_n=256, num_stages=3, grid_tile_width=4,
            grid_minor_dim="m",
        ),
    ),
    "one_block_small": dict(
        m=256, n=128, k=96, num_clusters=1,
        config=GemmConfig(
            collective=False, tile_n=64, tile_k=32, num_stages=2
        ),
    ),
}


def _compile(module, problem, **options):
  problem = {"dtype": jnp.float16, **problem}
  m, n, k, dtype = (problem[name] for name in ("m", "n", "k", "dtype"))
  return aot.compile_kernel(
      module.make_kernel(**problem),
      jax.ShapeDtypeStruct((m, k), dtype),
      jax.ShapeDtypeStruct((k, n), dtype),
      **options,
  )


class LoweringTest(parameterized.TestCase):

  @parameterized.product(
      module=(blackwell_gemm, by_hand), collective=(False, True)
  )
  def test_specs(self, module, collective):
    config = GemmConfig(collective=collective)
    found = budget.budget(
        module.specs(config=config), "b200", num_threads=2,
        cluster=(config.num_blocks,),
    )
    self.assertEqual(found.over, ())
    # Two accumulators, of 128 columns, or in a pair of 256.
    self.assertEqual(found.tmem_columns, 512 if collective else 256)


@aot_support.needs_compiler
class CodeTest(aot_support.CompilingTestCase):

  @parameterized.product(
      name=tuple(_PROBLEMS),
      dtype=(jnp.float16, jnp.bfloat16),
      target=("b200", "b300"),
  )
  def test_same_code(self, name, dtype, target):
    problem = {**_PROBLEMS[name], "dtype": dtype}
    spec, hand = (
        _compile(module, problem, target=target, sass=False)
        for module in (blackwell_gemm, by_hand)
    )
    blocks = problem.get("config", GemmConfig()).num_blocks
    aot.assert_same_code(spec, hand)
    for code in (spec, hand):
      self.assertEqual(code.registers, spec.registers)
      self.assertEqual(code.spill_bytes, 0)
      self.assertEqual(code.smem_bytes, spec.smem_bytes)
      self.assertEqual(code.cluster_size, blocks)
      [resources] = code.resources
      self.assertEqual(resources.over, ())
      self.assertEqual(resources.smem_bytes, code.smem_bytes)
      self.assertEqual(resources.tmem_columns, code.kernels[0].tmem_columns)

  def test_fills_the_gpu(self):
    problem = dict(m=8192, n=8192, k=64)
    code = _compile(blackwell_gemm, problem, target="b200", sass=False)
    self.assertEqual(code.kernels[0].grid[0], code.target.sm_count)

  def test_instructions(self):
    code = _compile(blackwell_gemm, _PROBLEMS["two_blocks"], target="b200")
    counts = code.class_counts()
    self.assertGreater(counts["tcgen05"], 0)
    self.assertGreater(counts["tma_load"], 0)
    self.assertGreater(counts["tma_store"], 0)
    aot.assert_contains(code.ptx, r"tcgen05\.mma\.cta_group::2")
    aot.assert_contains(code.ptx, r"tcgen05\.commit\.cta_group::2")


if __name__ == "__main__":
  absltest.main()
