"""What the hooks, and the git patches of the same slugs, must both do.

`python -m tests.behaviour` runs every case in the running JAX and prints what
came of it as JSON, slug by slug. It imports the plugin only if told to, so that
a patched JAX is tested by itself:

  python -m tests.behaviour          # JAX as it is
  python -m tests.behaviour plugin   # with `import jax_mgpu_ext`
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import warnings

if "plugin" in sys.argv[1:]:
  import jax_mgpu_ext  # pylint: disable=unused-import

import jax
from jax._src import core as jax_core
from jax._src.pallas.mosaic_gpu import core
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from tests import lowering
from tests import misuse_cases
from tests.misuse_cases import case

# The codes of each slug, as in the modules of the hooks; written down, since a
# patched JAX is tested without them. `equivalence_test` compares.
CODES = {
    "aval_dispatch": ("MGPU004", "MGPU005", "MGPU006"),
    "array_avals": ("MGPU010", "MGPU011", "MGPU012", "MGPU013", "MGPU014"),
    "scratch_trees": ("MGPU001", "MGPU002", "MGPU003"),
    "barrier_constructors": (
        "MGPU020", "MGPU021", "MGPU022", "MGPU023", "MGPU024"
    ),
    "barrier_indices": ("MGPU026",),
    "ref_unions": ("MGPU040", "MGPU041", "MGPU042"),
    "transforms": ("MGPU050", "MGPU051", "MGPU052", "MGPU053"),
    "cluster_axes": ("MGPU025", "MGPU030", "MGPU031", "MGPU032", "MGPU033"),
    "moved_keywords": ("MGPU060", "MGPU061"),
    "grid_trace_key": (),
    "interpret_deadlock": (
        "DL001", "DL002", "DL003", "DL004", "DL005", "DL006", "DL007", "DL009"
    ),
}
# The slug of the cases of a group that raise nothing.
GROUP_SLUGS = {
    "array_aval": "array_avals",
    "out_type": "array_avals",
    "scratch": "scratch_trees",
    "barriers": "barrier_constructors",
    "cluster_barrier": "cluster_axes",
    "barrier_index": "barrier_indices",
    "launch": "cluster_axes",
    "ref_union": "ref_unions",
    "smem": "transforms",
    "kernel": "moved_keywords",
}


class Ring:
  """A spec type of some other library."""


class DeepRing(Ring):
  pass


def _ring_aval(ring):
  del ring  # Unused.
  return plgpu.SMEM((2, 128), jnp.float32).get_ref_aval()


def _registered(run):
  """Runs a function while `Ring` is registered in JAX's own module."""
  def expr():
    core.register_spec(
        Ring, ref_aval=_ring_aval,
        array_aval=lambda ring: jax_core.ShapedArray(
            (2, 128), jnp.dtype(jnp.float32)
        ),
    )
    try:
      run()
    finally:
      _unregister()
  return expr


def _unregister():
  if hasattr(core, "unregister_spec"):
    core.unregister_spec(Ring)
  else:
    sys.modules["jax_mgpu_ext._src.avals"].unregister_spec(Ring)


def _use(x, o, ring):
  assert ring.shape == (2, 128), ring
  ring[0] = x[...]
  o[...] = ring[0]


def _run_scoped():
  def body(x, o):
    pl.run_scoped(lambda ring: _use(x, o, ring), Ring())
  lowering.lower(body=body)


def _pallas_call():
  jax.jit(pl.pallas_call(
      _use, out_shape=lowering.array(), scratch_shapes=[Ring()]
  )).trace(jnp.zeros((128,), jnp.float32))


def _out_type():
  def body(x, o):
    o[0] = x[...]
  lowering.lower(out=Ring(), body=body)


def _answers():
  assert core.ref_aval_of(Ring()) == _ring_aval(None)
  assert core.ref_aval_of(DeepRing()) == _ring_aval(None)
  assert core.array_aval_of(Ring()).shape == (2, 128)


def _num_programs(o):
  o[...] = jnp.full_like(o, pl.num_programs(0))


def _grids():
  found = [
      int(pl.pallas_call(
          _num_programs, out_shape=jax.ShapeDtypeStruct((8,), jnp.int32),
          grid=(size,), interpret=True,
      )()[0])
      for size in (2, 5, 3, 4)
  ]
  assert found == [2, 5, 3, 4], found


# A kernel that hangs where nobody sees it. In a process of its own, which can be
# ended: the interpreter of JAX as it is waits for ever.
_HANG = """
import jax
from jax import lax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

def body(o, done):
  @pl.when(lax.axis_index("wg") == 0)
  def _():
    plgpu.barrier_wait(done)
    o[...] = jnp.ones_like(o)

  if ARRIVES:
    pl.when(lax.axis_index("wg") == 1)(lambda: plgpu.barrier_arrive(done))

kernel = plgpu.kernel(
    body, out_type=jax.ShapeDtypeStruct((128,), jnp.float32),
    scratch_types=[plgpu.Barrier(num_barriers=())], num_threads=2,
    thread_name="wg", interpret=plgpu.InterpretGPUParams(),
)
assert float(kernel().sum()) == 128
"""


def _interpret(arrives):
  plugin = "import jax_mgpu_ext\n" if "jax_mgpu_ext" in sys.modules else ""
  done = subprocess.run(
      [sys.executable, "-c", f"{plugin}ARRIVES = {arrives}\n{_HANG}"],
      capture_output=True, text=True, timeout=20, check=False,
  )
  if done.returncode:
    raise RuntimeError(done.stderr)


MORE = {
    "interpret_deadlock": [
        case("hang", lambda: _interpret(False), RuntimeError,
             ["warpgroup 0 waits for", "0 of 1 arrivals"], since="0.11.2"),
        case("no_hang_is_fine", lambda: _interpret(True), since="0.11.2"),
    ],
    "aval_dispatch": [
        case("answers", _registered(_answers)),
        case("kernel", _registered(
            lambda: lowering.lower([Ring()], body=_use))),
        case("run_scoped", _registered(_run_scoped)),
        case("pallas_call", _registered(_pallas_call)),
        case("out_type", _registered(_out_type)),
        case("registered_twice", _registered(
            lambda: core.register_spec(Ring, ref_aval=_ring_aval)),
             (ValueError, TypeError), ["Ring", "override=True"]),
        case("type_of_jax", lambda: core.register_spec(
            plgpu.Barrier, ref_aval=_ring_aval),
             (ValueError, TypeError), ["Barrier", "override=True"]),
    ],
    "grid_trace_key": [case("grids", _grids)],
}


def slug_of(group: str, c) -> str:
  """Returns the slug that a misuse case belongs to."""
  for slug, codes in CODES.items():
    if c.code in codes:
      return slug
  return GROUP_SLUGS[group]


def all_cases():
  """Yields (slug, name, case) for the running release."""
  for group, cases in misuse_cases.GROUPS.items():
    for c in cases:
      if c.in_patches and lowering.version() >= c.since:
        yield slug_of(group, c), f"{group}/{c.id}", c
  for slug, cases in MORE.items():
    for c in cases:
      if lowering.version() < c.since:
        continue
      yield slug, f"{slug}/{c.id}", c


def outcome(c) -> str:
  """Returns `ok`, or what is wrong with a case."""
  kinds = c.raises if isinstance(c.raises, tuple) else (c.raises,)
  try:
    c.expr()
  except Exception as e:  # pylint: disable=broad-exception-caught
    text = f"{type(e).__name__}: {e}"
    if c.raises is None or not isinstance(e, kinds):
      return text
    missing = [fragment for fragment in c.says if fragment not in str(e)]
    return f"{text} lacks {missing}" if missing else "ok"
  return "ok" if c.raises is None else "accepted"


def main() -> None:
  warnings.simplefilter("ignore")
  report: dict[str, dict[str, str]] = {slug: {} for slug in CODES}
  for slug, name, c in all_cases():
    report[slug][name] = outcome(c)
  states = {}
  # JAX imports its interpreter, which a hook changes, when a kernel needs it.
  importlib.import_module(
      "jax._src.pallas.mosaic_gpu.interpret.jaxpr_interpret"
  )
  if "jax_mgpu_ext" in sys.modules:
    states = {s.slug: s.state for s in jax_mgpu_ext.status()}
  print(json.dumps(dict(cases=report, states=states)))


if __name__ == "__main__":
  main()
