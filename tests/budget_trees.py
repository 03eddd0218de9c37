"""Lowers generated kernels, and writes down what Mosaic GPU allocates for them.

  python -m tests.budget_trees COUNT

Run by `budget_test.py` in a process of its own. Prints one JSON line a kernel:
what `.resources.txt` and the launch say, and what our budgets say.
"""

from __future__ import annotations

import collections
import functools
import json
import os
import pathlib
import random
import re
import sys
import tempfile

_DUMPS = tempfile.TemporaryDirectory(prefix="mgpu-ext-budget-")
os.environ["MOSAIC_GPU_DUMP_TO"] = _DUMPS.name
os.environ["JAX_PLATFORMS"] = "cpu"

# pylint: disable=g-import-not-at-top
import jax
from jax import lax
from jax._src.pallas.mosaic_gpu import lowering
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import core as mosaic_core
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas.ops.gpu import attention_mgpu
import jax.numpy as jnp

from jax_mgpu_ext._src import budget
from jax_mgpu_ext._src import budget_kernel
from jax_mgpu_ext._src import kernel_calls
# pylint: enable=g-import-not-at-top

DTYPES = (
    "float32", "float16", "bfloat16", "int8", "uint8", "int16", "int32",
    "uint32", "bool", "int4", "uint4", "float8_e4m3fn", "float8_e5m2",
)
SHAPES = (
    (128,), (3, 128), (1, 1), (100,), (7, 5, 2), (64, 64), (2, 64, 64), ()
)
_NIBBLE_SHAPES = ((128,), (3, 64))
_UNION_DTYPES = ("float32", "float16", "int8", "int4", "float8_e5m2", "int32")


class Generator:
  """Makes trees of specs, always the same for the same number."""

  def __init__(self, seed: int):
    self._random = random.Random(seed)
    self.cluster = self._random.random() < 0.3
    self.blackwell = self._random.random() < 0.25
    self.collective = self.blackwell and self.cluster and self.chance(0.4)
    self.threads = self.choice((None, 2))

  def chance(self, probability: float) -> bool:
    return self._random.random() < probability

  def choice(self, values):
    return self._random.choice(values)

  def smem(self, dtypes=DTYPES):
    dtype = jnp.dtype(self.choice(dtypes))
    if self.chance(0.25):
      # Tiles of 8 rows of 128 bytes, as TMA and the tensor cores want them.
      dtype = jnp.dtype(self.choice(("float32", "float16", "int8")))
      columns = 128 // dtype.itemsize
      shape = self.choice(((64, 128), (2, 64, 128), (8, columns)))
      transforms = (
          plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(128)
      )
      return plgpu.SMEM(shape, dtype, transforms=transforms)
    shapes = _NIBBLE_SHAPES if dtype.name in ("int4", "uint4") else SHAPES
    return plgpu.SMEM(self.choice(shapes), dtype)

  def tmem(self):
    columns = self.choice((8, 16, 24, 32, 64, 128))
    dtype = self.choice((jnp.float32, jnp.float16))
    return plgpu.TMEM(
        (128, columns), dtype, packed=dtype == jnp.float16,
        collective=self.collective,
    )

  def union(self):
    if self.blackwell and self.chance(0.5):
      return plgpu.RefUnion(self.tmem(), [self.tmem(), self.tmem()])
    dtypes = _UNION_DTYPES
    return plgpu.RefUnion(
        *(
            [self.smem(dtypes) for _ in range(self.choice((1, 2, 3)))]
            if self.chance(0.6) else self.smem(dtypes)
            for _ in range(self.choice((1, 2, 3)))
        )
    )

  def accumulator(self):
    return plgpu.ACC((64, self.choice((8, 64))))

  def barrier(self):
    count = self.choice(((), 1, 2, 3, 7))
    if self.cluster and self.chance(0.5):
      return plgpu.ClusterBarrier(
          collective_axes=("x",), num_barriers=count,
          num_arrivals=self.choice((1, 2)),
      )
    extra = {}
    if self.blackwell and self.chance(0.3):
      extra = dict(orders_tensor_core=True)
    return plgpu.Barrier(
        num_arrivals=self.choice((1, 2)), num_barriers=count, **extra
    )

  def leaf(self):
    kinds = [self.smem] * 5 + [self.barrier] * 3 + [self.union]
    if self.threads is None:  # JAX refuses them among collective allocations.
      kinds += [self.accumulator]
    if self.blackwell:
      kinds += [self.tmem] * 2
    return self.choice(kinds)()

  def tree(self, depth=0):
    if depth and (depth > 2 or self.chance(0.6)):
      return self.leaf() if self.chance(0.95) else None
    items = [self.tree(depth + 1) for _ in range(self.choice((1, 2, 3, 4)))]
    if self.chance(0.5):
      return {f"name{i}": item for i, item in enumerate(items)}
    return items

  def scope(self, depth=0):
    """Returns what a body does: a nest of allocations, reductions, branches."""
    steps = []
    for _ in range(self.choice((0, 1, 2)) if depth < 3 else 0):
      kind = self.choice((
          "scope", "scope", "reduce", "cond", "loop", "jit", "accumulator"
      ))
      specs = self.tree() if kind == "scope" else None
      if kind == "accumulator":
        specs = [self.accumulator()]
      steps.append((
          kind, specs, self.scope(depth + 1) if kind != "reduce" else []
      ))
    return steps


def _run(steps, x, o, thread):
  """Carries out the steps of a `scope` in a kernel."""
  for kind, specs, inner in steps:
    run = functools.partial(_run, inner, x, o, thread)
    if kind == "reduce":
      if not thread:  # JAX 0.10.2 has no other reductions to a scalar.
        o[...] = x + jnp.max(x)
    elif specs is not None:
      items = specs if isinstance(specs, list) else []
      named = specs if isinstance(specs, dict) else {}
      pl.run_scoped(
          lambda *unused, **unused_named: run(), *items,  # pylint: disable=cell-var-from-loop
          collective_axes=() if kind == "accumulator" else thread, **named,
      )
    elif kind == "cond":
      pl.when(lax.axis_index("g") == 0)(run)
    elif kind == "jit":
      jax.jit(run)()
    else:
      lax.fori_loop(0, 2, lambda i, carry: (run(), carry)[1], 0)


def _barriers(text: str) -> int:
  """Returns the number of mbarriers in a `.resources.txt`."""
  found = re.findall(r"Barrier\((?:.*?)num_barriers=(\d+).*?\): (\d+)", text)
  return sum(int(number) * int(count) for number, count in found)


def _field(text: str, name: str) -> int:
  return int(re.search(rf"\b{name}=(\d+)", text)[1])


def _estimate(call: kernel_calls.KernelCall):
  """Returns JAX's own estimate."""
  mesh, params = call.mesh, call.compiler_params
  # pylint: disable=protected-access
  return lowering._estimate_resources(
      lowering.ResourceEstimatorContext(
          reduction_scratch_bytes=params.reduction_scratch_bytes,
          axis_names=lowering._AxisNames(
              mesh.grid_names, mesh.cluster_names, mesh.thread_name
          ).reverse(),
          lowering_semantics=params.lowering_semantics,
      ),
      call.jaxpr,
  )


launches = []


def _watch_launches():
  """Notes the dynamic shared memory of every launch that is lowered."""
  original = mosaic_core._gpu_ops_gen.LaunchOp  # pylint: disable=protected-access

  class Watched(original):  # pylint: disable=missing-class-docstring

    def __init__(self, *args, **kwargs):
      size = kwargs["dynamicSharedMemorySize"]
      launches.append(size.owner.attributes["value"].value)
      super().__init__(*args, **kwargs)

  class Module:

    def __getattr__(self, name):
      return Watched if name == "LaunchOp" else getattr(generated, name)

  generated = mosaic_core._gpu_ops_gen  # pylint: disable=protected-access
  mosaic_core._gpu_ops_gen = Module()  # pylint: disable=protected-access


def check(number: int) -> dict:
  """Lowers kernel `number`, and returns what is said of it."""
  make = Generator(number)
  in_body = number % 2 == 1
  specs = make.tree()
  steps = make.scope() if in_body else []
  threads = make.threads
  params = {}
  if make.chance(0.3):
    params["reduction_scratch_bytes"] = make.choice((512, 4096, 5000))
  if make.chance(0.15):
    params.update(profile_space=3, profile_dir=_DUMPS.name)
    if make.chance(0.5):
      params.update(profile_trace_scope=plgpu.TraceScope.WARP)

  def body(x, o, *unused, **unused_named):
    value = x[...]
    o[...] = value
    _run(steps, value, o, () if threads is None else "t")

  body.__name__ = f"tree{number}"
  mesh = dict(grid=(2,), grid_names=("g",))
  if make.cluster:
    mesh.update(cluster=(2,), cluster_names=("x",))
  if threads is not None:
    mesh.update(num_threads=threads, thread_name="t")
  kernel = plgpu.kernel(
      body, out_type=jax.ShapeDtypeStruct((128,), jnp.float32),
      scratch_types=specs, compiler_params=plgpu.CompilerParams(**params),
      **mesh,
  )
  traced = jax.jit(kernel).trace(jnp.zeros((128,), jnp.float32))
  target = "b200" if make.blackwell else "h100"
  sizes = dict(cluster=mesh.get("cluster", ()), num_threads=threads)
  result = dict(number=number, in_body=in_body, specs=repr(specs)[:2000])
  result["fits"] = budget.fits(specs, target, **sizes)
  tree = budget.budget(specs, target, **sizes)
  result["tree"] = _numbers(tree)
  result["profiled"] = "profile_space" in params
  return {**result, **compare(traced, target, body.__name__)}


def compare(traced, target: str, name: str) -> dict:
  """Returns what is said of the kernel of a program, by JAX and by us."""
  [call] = kernel_calls.find(traced)
  whole = budget_kernel.budget_kernel(traced, target)
  estimate = _estimate(call)
  result = {}
  result["estimate"] = [
      estimate.smem_scratch_bytes,
      estimate.tmem_scratch_cols + estimate.tmem_collective_scratch_cols,
      sum(b.num_barriers for b in estimate.barriers),
  ]
  result["kernel"] = _numbers(whole)
  result["kinds"] = sorted({row.kind for row in whole.rows})
  before = len(launches)
  try:
    # Sizes are checked against the limit of this machine's "GPU" when it is
    # lowered; what is too large has no launch to compare with. What profiles
    # ends in a callback that cannot be lowered here, after the launch.
    traced.lower(lowering_platforms=("cuda",))
  except ValueError as e:
    result["error"] = str(e)
  [result["launch"]] = launches[before:] or [None]
  # JAX 0.10.2 writes none.
  for path in pathlib.Path(_DUMPS.name).glob(f"{name}_*.resources.txt"):
    text = path.read_text(encoding="utf-8")
    result["resources"] = [
        _field(text, "smem_scratch_bytes"),
        _field(text, "tmem_scratch_cols")
        + _field(text, "tmem_collective_scratch_cols"),
        _barriers(text),
    ]
  return result


def own_kernel() -> dict:
  """Returns the same of a kernel that JAX itself has for Hopper."""
  config = attention_mgpu.TuningConfig(
      block_q=64, block_kv=64, max_concurrent_steps=2
  )
  # The one that needs nothing of CUDA to be traced.
  function = attention_mgpu.attention_with_pipeline_emitter
  q = jax.ShapeDtypeStruct((1, 512, 2, 128), jnp.float16)
  traced = jax.jit(functools.partial(function, config=config)).trace(q, q, q)
  [call] = kernel_calls.find(traced)
  return dict(
      number=function.__name__, specs="", in_body=True, profiled=False,
      **compare(traced, "h100", call.name),
  )


def _numbers(found: budget.Budget) -> dict:
  """Returns the numbers of a budget, and the sums of its rows."""
  rows = [row for row in found.rows if row.in_total]
  places = [
      (row.offset_bytes, row.smem_bytes + row.padding_bytes)
      for row in rows if row.smem_bytes + row.padding_bytes
  ]
  kinds = collections.Counter()
  for row in rows:
    kinds[row.kind] += row.smem_bytes + row.padding_bytes
  late = ("barrier", "cluster barrier", "tmem address", "profiler")
  return dict(
      smem_bytes=found.smem_bytes,
      scratch=sum(size for kind, size in kinds.items() if kind not in late),
      barriers=sum(
          row.smem_bytes for row in rows if "barrier" in row.kind
      ) // 8,
      columns=found.tmem_columns_requested,
      row_columns=sum(row.tmem_columns for row in rows),
      rows=sum(size for _, size in places),
      places=sorted(places),
      registers=found.registers_per_thread,
      row_registers=sum(row.registers_per_thread for row in rows),
      fits=found.fits,
      codes=[e.code for e in found.over],
  )


def main(count: int) -> None:
  _watch_launches()
  for number in range(count):
    print(json.dumps(check(number)), flush=True)
  print(json.dumps(own_kernel()), flush=True)


if __name__ == "__main__":
  main(int(sys.argv[1]))
