"""Misuse of specs: what is written, and what the user must be told.

Each case has an `id`; `expr`, a function of no arguments; `raises`, the
exception type or all the types that the error must be an instance of, None
where the program is right and must be accepted; `says`, fragments of its text;
`code`, its catalog code; `since`, the first JAX release where it exists; and
`in_patches`, whether a JAX with our git patches says it too.
Every kind of error has a positive twin: a case with `raises` None.
"""

from __future__ import annotations

import collections
import dataclasses
import types

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np

from tests.lowering import array
from tests.lowering import CLUSTER
from tests.lowering import F32
from tests.lowering import lower

CB = plgpu.ClusterBarrier
B = plgpu.Barrier
SMEM = plgpu.SMEM
TMEM = plgpu.TMEM
LANE = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
WARPGROUP = plgpu.CompilerParams(
    lowering_semantics=plgpu.LoweringSemantics.Warpgroup
)
MESH = plgpu.Mesh(grid=(2,), grid_names=("g",))


def case(
    id,  # pylint: disable=redefined-builtin
    expr, raises=None, says=(), code="", since="0.10.2", in_patches=True,
):
  return types.SimpleNamespace(
      id=id, expr=expr, raises=raises, says=tuple(says), code=code,
      since=tuple(map(int, since.split("."))), in_patches=in_patches,
  )


def check(holds):
  assert holds


def pallas_call(out=None, scratch=()):
  return jax.jit(pl.pallas_call(
      lambda x, o, *s: None,
      out_shape=array() if out is None else out, scratch_shapes=scratch,
  )).trace(jnp.zeros((128,), F32))


def grid_spec(scratch):
  return jax.jit(pl.pallas_call(
      lambda x, o, *s: None, out_shape=array(),
      grid_spec=pl.GridSpec(grid=(1,), scratch_shapes=scratch),
  )).trace(jnp.zeros((128,), F32))


def scoped(*specs, **named):
  """Allocates in the kernel's body."""
  def body(x, o):
    pl.run_scoped(lambda *refs, **kw: None, *specs, **named)
    o[...] = x[...]
  return lower(body=body)


def arrive_at(index, num_barriers=2, kind=B, **kw):
  def body(x, o, barrier):
    plgpu.barrier_arrive(barrier.at[index])
    plgpu.barrier_wait(barrier.at[index])
    o[...] = x[...]
  return lower([kind(num_barriers=num_barriers, **kw)], body=body, **CLUSTER)


def tiled(shape, tiling, *more):
  return SMEM(
      shape, jnp.float16, transforms=(plgpu.TilingTransform(tiling), *more)
  ).get_ref_aval()


def swizzled(shape, swizzle):
  return SMEM(
      shape, jnp.float16, transforms=(plgpu.SwizzleTransform(swizzle),)
  ).get_ref_aval()


Pair = collections.namedtuple("Pair", ["full", "empty"])


class Hostile:
  """Its repr raises, as that of a broken or half-made object does."""

  def __repr__(self):
    raise RuntimeError("no repr")


HOSTILE = Hostile()


class Lazy:
  """A spec of another library that does not know its dtype yet."""

  def get_ref_aval(self):
    return SMEM((8,), F32).get_ref_aval()

  @property
  def dtype(self):
    raise RuntimeError("not known yet")


class NoAval:
  """A spec of another library whose method forgets its `return`."""

  def get_ref_aval(self):
    pass


class NoShape:
  shape = None
  dtype = None


class OwnDict(dict):
  pass


class OwnList(list):
  pass


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Composite:
  """A composite whose constructor looks at its fields."""

  tiles: object
  full: object

  def __post_init__(self):
    assert self.tiles.shape == (8,), self.tiles
    assert isinstance(self.full, (plgpu.Barrier, jax.core.Tracer)), self.full


ARRAY_AVALS = [
    case("barrier", lambda: B().get_array_aval(), ValueError,
         ["Barriers are not arrays", "get_ref_aval"], "MGPU010"),
    case("cluster_barrier", lambda: CB(collective_axes=("x",)).get_array_aval(),
         ValueError, ["Cluster barriers are not arrays", "get_ref_aval"],
         "MGPU011"),
    case("accumulator", lambda: plgpu.ACC((64, 64)).get_array_aval(),
         (ValueError, AttributeError), ["not arrays", "get_ref_aval"],
         "MGPU012"),
    case("smem_is_fine", lambda: SMEM((128,), F32).get_array_aval()),
    case("semaphore_is_fine",
         lambda: plgpu.SemaphoreType.REGULAR.get_array_aval()),
]

OUT_TYPES = [
    case("cluster_barrier", lambda: lower(out=CB(collective_axes=("x",))),
         ValueError, ["Cluster barriers are not arrays", "out_type"],
         "MGPU011"),
    case("nested_barrier", lambda: lower(out=[array(), B()]), ValueError,
         ["Barriers are not arrays", "out_type[1]"], "MGPU010"),
    case("deep", lambda: lower(out=[dict(a=array(), b=[B()])]), ValueError,
         ["Barriers are not arrays", "out_type[0]['b'][0]"], "MGPU010"),
    case("accumulator", lambda: lower(out=plgpu.ACC((64, 64))), ValueError,
         ["not arrays", "out_type"], "MGPU012"),
    case("class", lambda: lower(out=[plgpu.Barrier]), ValueError,
         ["Invalid out_shape type", "Barrier", "out_type[0]"], "MGPU013"),
    case("array_class", lambda: lower(out=jax.ShapeDtypeStruct),
         (ValueError, TypeError), ["Invalid out_shape type", "out_type"],
         "MGPU013"),
    case("semaphore", lambda: pallas_call(out=plgpu.SemaphoreType.REGULAR),
         ValueError, ["Invalid out_shape type", "SemaphoreType"]),
    case("number", lambda: lower(out=[3]), ValueError,
         ["Invalid out_shape type", "3", "out_type[0]"], "MGPU013"),
    case("shape", lambda: lower(out=(128,)), ValueError,
         ["Invalid out_shape type", "128", "out_type[0]"], "MGPU013"),
    case("smem", lambda: lower(out=SMEM((128,), F32)), ValueError,
         ["SMEM", "out_type"], "MGPU014"),
    case("tmem", lambda: lower(out=(array(), TMEM((128, 128), F32))),
         ValueError, ["TMEM", "out_type[1]", "(128, 128)"], "MGPU014"),
    case("regs", lambda: lower(out=plgpu.REGS((128,), F32)), ValueError,
         ["REGS", "out_type"], "MGPU014"),
    case("ref_union", lambda: lower(out=plgpu.RefUnion(SMEM((128,), F32))),
         ValueError, ["SMEM", "out_type"], "MGPU014"),
    case("pallas_call_barrier", lambda: pallas_call(out=[array(), B()]),
         ValueError, ["Barriers are not arrays", "out_shape[1]"], "MGPU010"),
    case("pallas_call_smem", lambda: pallas_call(out=SMEM((128,), F32)),
         ValueError, ["SMEM", "out_shape"], "MGPU014"),
    case("pl_kernel_barrier",
         lambda: pl.kernel(lambda o: None, out_type=[B()], mesh=MESH),
         ValueError, ["Barriers are not arrays", "out_type[0]"], "MGPU010"),
    case("gmem_is_fine", lambda: lower(out=plgpu.GMEM((128,), F32))),
    case("nested_is_fine", lambda: lower(
        out=[array()], body=lambda x, o: None)),
    case("pallas_call_is_fine", lambda: pallas_call(out=[array()])),
]

SCRATCH = [
    case("shape_dtype_struct", lambda: lower([array()]),
         (ValueError, AttributeError),
         ["scratch_types[0]", "ShapeDtypeStruct", "SMEM"], "MGPU001"),
    case("array", lambda: lower([np.zeros((128,), np.float32)]), ValueError,
         ["scratch_types[0]", "ndarray"], "MGPU001"),
    case("jax_array", lambda: lower([jnp.zeros((128,), F32)]), ValueError,
         ["scratch_types[0]", "float32[128]"], "MGPU001"),
    case("number", lambda: lower([B(), 3]), ValueError,
         ["scratch_types[1]", "int", "3"], "MGPU001"),
    case("memory_space", lambda: lower([plgpu.SMEM]), ValueError,
         ["scratch_types[0]", "SMEM(shape, dtype)"], "MGPU001"),
    case("hostile_repr", lambda: lower([Hostile()]), ValueError,
         ["scratch_types[0]", "Hostile"], "MGPU001"),
    case("long_repr", lambda: lower(["y" * 10_000]), ValueError,
         ["scratch_types[0]", "yyy..."], "MGPU001"),
    case("nested", lambda: lower([[B(), dict(a=array())]]), ValueError,
         ["scratch_types[0][1]['a']"], "MGPU001"),
    case("class_not_instance", lambda: lower(dict(done=plgpu.Barrier)),
         (ValueError, TypeError), ["scratch_types['done']", "Barrier()"],
         "MGPU002"),
    case("cluster_class", lambda: lower([plgpu.ClusterBarrier]), ValueError,
         ["scratch_types[0]", "ClusterBarrier(collective_axes=...)"],
         "MGPU002"),
    case("semaphore_class", lambda: lower([plgpu.SemaphoreType]), ValueError,
         ["scratch_types[0]", "SemaphoreType.REGULAR"], "MGPU002"),
    case("bare_spec", lambda: lower(B()), (ValueError, TypeError),
         ["scratch_types", "sequence or a mapping", "[...]"], "MGPU003"),
    case("generator", lambda: lower(B() for _ in range(2)), ValueError,
         ["scratch_types", "sequence or a mapping"], "MGPU003"),
    case("text", lambda: lower("barrier"), ValueError,
         ["scratch_types", "'barrier'"], "MGPU003"),
    case("run_scoped", lambda: scoped(array()), ValueError, ["types[0]", "SMEM"],
         "MGPU001"),
    case("run_scoped_keyword", lambda: scoped(acc=array()), ValueError,
         ["types['acc']", "SMEM"], "MGPU001"),
    case("run_scoped_class", lambda: scoped([B(), plgpu.Barrier]), ValueError,
         ["types[0][1]", "Barrier()"], "MGPU002"),
    case("pallas_call", lambda: pallas_call(scratch=[array(1)]), ValueError,
         ["scratch_shapes[0]", "ShapeDtypeStruct"], "MGPU001"),
    case("grid_spec", lambda: grid_spec([array(1)]), ValueError,
         ["scratch_shapes[0]", "ShapeDtypeStruct"], "MGPU001"),
    case("pl_kernel", lambda: pl.kernel(
        lambda *refs: None, out_type=array(), mesh=MESH, scratch_types=[3],
    ), ValueError, ["scratch_types[0]", "3"], "MGPU001"),
    case("transforms_in_pl_kernel", lambda: jax.jit(pl.kernel(
        lambda *refs: None, out_type=array(), mesh=MESH,
        scratch_types=[SMEM((8, 64), jnp.float16, transforms=(
            plgpu.TilingTransform((8, 64)),))],
    )).trace(jnp.zeros((128,), F32)), (ValueError, AssertionError),
         ["plgpu.kernel(scratch_types=...)"], "MGPU005"),
    case("pl_kernel_deque", lambda: pl.kernel(
        lambda *refs: None, out_type=array(), mesh=MESH,
        scratch_types=collections.UserList([3]),
    ), ValueError, ["scratch_types[0]", "3"], "MGPU001"),
    case("preinitialised_accumulator",
         lambda: lower([plgpu.ACC.init(jnp.zeros((64, 64)))]), ValueError,
         ["Preinitialized WGMMAAccumulatorRef", "scratch_types[0]"],
         "MGPU004"),
    case("pl_kernel_deque_is_fine", lambda: pl.kernel(
        lambda *refs: None, out_type=array(), mesh=MESH,
        scratch_types=collections.UserList([B()]),
    )),
    case("none_is_fine", lambda: lower([None])),
    case("empty_is_fine", lambda: lower(())),
    case("none_for_all_is_fine", lambda: lower(None)),
    case("nested_is_fine", lambda: lower([[B()], dict(a=SMEM((8,), F32))])),
    case("other_mapping_is_fine",
         lambda: lower(types.MappingProxyType(dict(done=B())))),
    case("other_sequence_is_fine",
         lambda: lower(collections.UserList([B(), SMEM((8,), F32)]))),
    case("named_tuple_is_fine", lambda: lower(Pair(B(), B()))),
    case("own_dict_is_fine", lambda: lower(OwnDict(done=B()))),
    case("own_list_is_fine", lambda: lower(OwnList([B(), None]))),
    case("lazy_spec_is_fine", lambda: lower([Lazy()])),
    case("composite_is_fine",
         lambda: lower([Composite(SMEM((8,), F32), B())])),
    case("composite_in_run_scoped_is_fine",
         lambda: scoped(Composite(SMEM((8,), F32), B()))),
    case("empty_text_is_fine", lambda: lower("")),
    case("empty_set_is_fine", lambda: lower(set())),
    case("number_as_name", lambda: lower({1: B()}), TypeError,
         ["must be strings"]),
    case("mixed_names", lambda: lower({1: B(), "a": B()}), TypeError,
         ["must be strings"]),
    case("no_aval", lambda: lower([NoAval()]), (ValueError, TypeError),
         ["scratch_types[0]", "get_ref_aval", "None"], "MGPU006",
         in_patches=False),
    case("no_shape", lambda: lower([NoShape()]), ValueError,
         ["scratch_types[0]", "NoShape"], "MGPU001"),
    case("escapes", lambda: lower(["\x1b[31mred\n" * 3]), ValueError,
         ["scratch_types[0]", "\\x1b[31mred"], "MGPU001"),
    case("other_mapping", lambda: lower(
        types.MappingProxyType(dict(done=array()))), ValueError,
         ["scratch_types['done']"], "MGPU001"),
    case("other_sequence", lambda: lower(collections.UserList([B(), 3])),
         ValueError, ["scratch_types[1]"], "MGPU001"),
    case("mapping_is_fine", lambda: lower(dict(done=B()))),
    case("semaphore_is_fine", lambda: lower([plgpu.SemaphoreType.REGULAR])),
    case("run_scoped_is_fine", lambda: scoped(B(), acc=SMEM((8,), F32))),
    case("pallas_call_is_fine",
         lambda: pallas_call(scratch=[SMEM((8,), F32)])),
]

BARRIERS = []
for name, make in (("barrier", B),
                   ("cluster_barrier",
                    lambda **kw: CB(collective_axes=("x",), **kw))):
  def new(name, make=make, **kw):  # pylint: disable=redefined-outer-name
    return lambda: make(**kw)

  BARRIERS += [
      case(f"{name}/huge_arrivals", new(name, num_arrivals=10**5000),
           ValueError, ["num_arrivals"], "MGPU021", in_patches=False),
      case(f"{name}/negative_count", new(name, num_barriers=-1), ValueError,
           ["num_barriers", "-1"], "MGPU022"),
      case(f"{name}/zero_count", new(name, num_barriers=0), ValueError,
           ["num_barriers", "0"], "MGPU022"),
      case(f"{name}/zero_in_shape", new(name, num_barriers=(2, 0)), ValueError,
           ["num_barriers", "(2, 0)"], "MGPU022"),
      case(f"{name}/float_count", new(name, num_barriers=1.5),
           (ValueError, TypeError), ["num_barriers", "1.5"], "MGPU020"),
      case(f"{name}/float_in_shape", new(name, num_barriers=(2, 1.5)),
           (ValueError, TypeError), ["num_barriers", "(2, 1.5)"], "MGPU020"),
      case(f"{name}/text_count", new(name, num_barriers="2"),
           (ValueError, TypeError), ["num_barriers", "'2'"], "MGPU020"),
      case(f"{name}/none_count", new(name, num_barriers=None),
           (ValueError, TypeError), ["num_barriers", "None"], "MGPU020"),
      case(f"{name}/float_arrivals", new(name, num_arrivals=1.5),
           (ValueError, TypeError), ["num_arrivals", "1.5"], "MGPU020"),
      case(f"{name}/text_arrivals", new(name, num_arrivals="2"),
           (ValueError, TypeError), ["num_arrivals", "'2'"], "MGPU020"),
      case(f"{name}/zero_arrivals", new(name, num_arrivals=0), ValueError,
           ["at least 1, but got 0"], "MGPU021"),
      case(f"{name}/negative_arrivals", new(name, num_arrivals=-3), ValueError,
           ["at least 1, but got -3"], "MGPU021"),
      case(f"{name}/too_many_arrivals", new(name, num_arrivals=2**21),
           ValueError, ["num_arrivals", "2097152"], "MGPU021"),
      case(f"{name}/one_too_many_arrivals", new(name, num_arrivals=2**20),
           ValueError, ["num_arrivals", "1048575"], "MGPU021"),
      case(f"{name}/traced_arrivals", lambda make=make: jax.jit(
          lambda n: make(num_arrivals=n) and n).trace(3),
           (ValueError, TypeError), ["num_arrivals", "traced"], "MGPU020"),
      case(f"{name}/most_arrivals_is_fine",
           new(name, num_arrivals=2**20 - 1)),
      case(f"{name}/numpy_is_fine",
           lambda make=make: hash(make(
               num_arrivals=np.int32(2), num_barriers=np.int64(3)))),
      case(f"{name}/shape_is_fine",
           lambda make=make: lower(
               [make(num_barriers=(2, np.int8(3)))], **CLUSTER)),
      case(f"{name}/no_shape_is_fine",
           lambda make=make: lower([make(num_barriers=())], **CLUSTER)),
  ]

AXES = [
    case("string_axes", lambda: CB(collective_axes="cluster"),
         (ValueError, TypeError), ["collective_axes", "('cluster',)"],
         "MGPU023"),
    case("number_axes", lambda: CB(collective_axes=0), (ValueError, TypeError),
         ["collective_axes", "0"], "MGPU023"),
    case("none_axes", lambda: CB(collective_axes=None),
         (ValueError, TypeError), ["collective_axes", "None"], "MGPU023"),
    case("set_axes", lambda: CB(collective_axes={"x"}), (ValueError, TypeError),
         ["collective_axes"], "MGPU023"),
    case("duplicate_axes", lambda: CB(collective_axes=("x", "x")), ValueError,
         ["collective_axes", "'x'"], "MGPU024"),
    case("duplicate_in_group", lambda: CB(collective_axes=(("x", "y"), "y")),
         ValueError, ["collective_axes", "'y'"], "MGPU024"),
    case("unknown_axis", lambda: lower([CB(collective_axes=("y",))], **CLUSTER),
         (ValueError, LookupError), ["'y'", "'x'", "scratch_types[0]"],
         "MGPU030"),
    case("unknown_axis_in_group",
         lambda: lower([CB(collective_axes=(("x", "y"),))], **CLUSTER),
         (ValueError, LookupError), ["'y'", "scratch_types[0]"], "MGPU030"),
    case("unknown_axis_nested",
         lambda: lower(dict(a=[B(), CB(collective_axes=("y",))]), **CLUSTER),
         (ValueError, LookupError), ["'y'", "scratch_types['a'][1]"],
         "MGPU030"),
    case("grid_axis", lambda: lower(
        [CB(collective_axes=("g",))], grid=(2,), grid_names=("g",), **CLUSTER),
         (ValueError, LookupError), ["'g'", "'x'"], "MGPU030"),
    case("no_cluster", lambda: lower([CB(collective_axes=("x",))]),
         (ValueError, LookupError), ["'x'", "cluster"], "MGPU030"),
    case("run_scoped_unknown_axis", lambda: scoped(CB(collective_axes=("y",))),
         (ValueError, LookupError), ["Unknown cluster axis y", "'y'"],
         "MGPU030"),
    case("hostile_axes", lambda: CB(collective_axes=(HOSTILE, HOSTILE)),
         ValueError, ["collective_axes", "twice"], "MGPU024",
         in_patches=False),
    case("list_axes", lambda: hash(CB(collective_axes=["x"]).get_ref_aval())),
    case("nested_list_axes",
         lambda: hash(CB(collective_axes=[["x", "y"]]).get_ref_aval())),
    case("no_axes_is_fine",
         lambda: lower([CB(collective_axes=())], **CLUSTER)),
    case("group_is_fine", lambda: lower(
        [CB(collective_axes=(("x", "y"),))],
        cluster=(2, 2), cluster_names=("x", "y"))),
    case("object_axis_is_fine", lambda axis=object(): lower(
        [CB(collective_axes=(axis,))], cluster=(2,), cluster_names=(axis,))),
]

INDICES = []
for kind_name, kind in (("barrier", dict(kind=B)),
                        ("cluster_barrier",
                         dict(kind=CB, collective_axes=("x",)))):
  INDICES += [
      case(f"{kind_name}/end", lambda k=kind: arrive_at(2, **k),
           (ValueError, IndexError), ["2", "(2,)", "num_barriers"], "MGPU026"),
      case(f"{kind_name}/far", lambda k=kind: arrive_at(7, **k), ValueError,
           ["index 7", "0 to 1"], "MGPU026"),
      case(f"{kind_name}/negative", lambda k=kind: arrive_at(-1, **k),
           ValueError, ["-1", "negative"], "MGPU026"),
      case(f"{kind_name}/numpy",
           lambda k=kind: arrive_at(np.int32(5), **k), ValueError,
           ["index 5"], "MGPU026"),
      case(f"{kind_name}/second_dimension",
           lambda k=kind: arrive_at((1, 3), num_barriers=(2, 3), **k),
           ValueError, ["index 3", "dimension 1", "(2, 3)"], "MGPU026"),
      case(f"{kind_name}/behind_ellipsis",
           lambda k=kind: arrive_at((1, ..., 3), num_barriers=(2, 3), **k),
           ValueError, ["index 3", "dimension 1"], "MGPU026"),
      case(f"{kind_name}/ellipsis_is_fine",
           lambda k=kind: arrive_at((..., 1, 2), num_barriers=(2, 3), **k)),
      case(f"{kind_name}/last_is_fine", lambda k=kind: arrive_at(1, **k)),
      case(f"{kind_name}/second_dimension_is_fine",
           lambda k=kind: arrive_at((1, 2), num_barriers=(2, 3), **k)),
  ]

LAUNCH = [
    case("cluster_of_32", lambda: lower(cluster=(32,), cluster_names=("x",)),
         ValueError, ["32", "16"], "MGPU031"),
    case("cluster_of_8_by_8",
         lambda: lower(cluster=(8, 8), cluster_names=("x", "y")),
         ValueError, ["64", "16", "(8, 8)"], "MGPU031"),
    case("mesh_of_32",
         lambda: plgpu.Mesh(cluster=(32,), cluster_names=("x",)), ValueError,
         ["32", "16"], "MGPU031"),
    case("shared_name",
         lambda: lower(grid=(2,), grid_names=("x",), **CLUSTER), ValueError,
         ["'x'", "grid_names", "cluster_names"], "MGPU032"),
    case("thread_name", lambda: lower(
        num_threads=2, thread_name="x", **CLUSTER), ValueError,
         ["'x'", "cluster_names", "thread_name"], "MGPU032"),
    case("name_twice_in_cluster",
         lambda: lower(cluster=(2, 2), cluster_names=("x", "x")), ValueError,
         ["'x'", "cluster_names"], "MGPU032"),
    case("zero_cluster", lambda: lower(cluster=(0,), cluster_names=("x",)),
         ValueError, ["cluster", "(0,)"], "MGPU033"),
    case("negative_grid", lambda: lower(grid=(-2,), grid_names=("g",)),
         ValueError, ["grid", "(-2,)"], "MGPU033"),
    case("float_cluster", lambda: lower(cluster=(2.0,), cluster_names=("x",)),
         (ValueError, TypeError), ["cluster", "(2.0,)"], "MGPU033"),
    case("text_grid", lambda: lower(grid="ab", grid_names=("x", "y")),
         (ValueError, TypeError, AssertionError), ["grid", "ab"], "MGPU033"),
    case("bare_cluster", lambda: lower(cluster=2, cluster_names=("x",)),
         (ValueError, TypeError), ["cluster=2", "(2,)"], "MGPU033"),
    case("bare_grid", lambda: lower(grid=4, grid_names=("g",)),
         (ValueError, TypeError), ["grid=4", "(4,)"], "MGPU033"),
    case("arrivals_times_128", lambda: lower(
        [B(num_arrivals=2**14)], compiler_params=LANE), ValueError,
         ["2097152", "128", "scratch_types[0]", "8191"], "MGPU025"),
    case("arrivals_times_cluster", lambda: lower(
        dict(a=CB(collective_axes=("x",), num_arrivals=2**19)), **CLUSTER),
         ValueError, ["1048576", "scratch_types['a']", "524287"], "MGPU025"),
    case("arrivals_times_128_fit", lambda: lower(
        [B(num_arrivals=8191)], compiler_params=LANE)),
    case("arrivals_of_warpgroups_fit", lambda: lower(
        [B(num_arrivals=2**14)], compiler_params=WARPGROUP)),
    case("arrivals_of_tensor_core_fit", lambda: lower(
        [B(num_arrivals=2**14, orders_tensor_core=True)],
        compiler_params=LANE)),
    case("float_num_threads",
         lambda: lower(num_threads=2.5, thread_name="t"),
         (ValueError, TypeError, AssertionError), ["num_threads", "2.5"],
         "MGPU033"),
    case("views_are_fine", lambda: lower(
        grid=dict(g=2).values(), grid_names=dict(g=2).keys())),
    case("numpy_num_threads_is_fine",
         lambda: lower(num_threads=np.int64(2), thread_name="t")),
    case("cluster_of_16_is_fine",
         lambda: lower(cluster=(4, 2, 2), cluster_names=("x", "y", "z"))),
    case("numpy_cluster_is_fine",
         lambda: lower(cluster=(np.int64(2),), cluster_names=("x",))),
    case("names_are_fine", lambda: lower(
        grid=(2,), grid_names=("g",), num_threads=2, thread_name="t",
        **CLUSTER)),
]

UNIONS = [
    case("barrier", lambda: plgpu.RefUnion(SMEM((128,), F32), B()),
         (ValueError, AttributeError), ["RefUnion", "Barrier", "refs[1]"],
         "MGPU040"),
    case("cluster_barrier",
         lambda: plgpu.RefUnion(CB(collective_axes=("x",))), ValueError,
         ["RefUnion", "ClusterBarrier", "refs[0]"], "MGPU040"),
    case("nested_barrier", lambda: plgpu.RefUnion(
        SMEM((128,), F32), [SMEM((8,), F32), dict(b=B())]), ValueError,
         ["RefUnion", "Barrier", "refs[1][1]['b']"], "MGPU040"),
    case("accumulator", lambda: plgpu.RefUnion(plgpu.ACC((64, 64))),
         ValueError, ["RefUnion", "WGMMAAccumulatorRef"], "MGPU040"),
    case("shape_dtype_struct", lambda: plgpu.RefUnion(array()),
         ValueError, ["RefUnion", "ShapeDtypeStruct"], "MGPU040"),
    case("class", lambda: plgpu.RefUnion(plgpu.Barrier), ValueError,
         ["RefUnion", "Barrier"], "MGPU040"),
    case("mixed", lambda: plgpu.RefUnion(
        SMEM((128,), F32), TMEM((128, 128), F32)),
         (ValueError, NotImplementedError), ["smem", "tmem", "refs[1]"],
         "MGPU041"),
    case("gmem", lambda: plgpu.RefUnion(plgpu.GMEM((128,), F32)),
         (ValueError, NotImplementedError),
         ["All aliased Refs must have the same memory space", "gmem"],
         "MGPU041"),
    case("empty", plgpu.RefUnion, ValueError, ["RefUnion", "at least one"],
         "MGPU042"),
    case("empty_groups", lambda: plgpu.RefUnion([], {}), ValueError,
         ["RefUnion", "at least one"], "MGPU042"),
    case("smem_is_fine", lambda: lower([plgpu.RefUnion(
        SMEM((128,), F32), [SMEM((8,), F32), SMEM((8,), F32)])])),
    case("tmem_is_fine", lambda: plgpu.RefUnion(
        TMEM((128, 128), F32), TMEM((128, 64), F32)).get_ref_aval()),
    case("union_of_union_is_fine", lambda: plgpu.RefUnion(
        plgpu.RefUnion(SMEM((128,), F32)), SMEM((8,), F32))),
]

TRANSFORMS = [
    case("indivisible_tiling", lambda: SMEM(
        (100, 100), F32, transforms=(plgpu.TilingTransform((8, 64)),)
    ).get_ref_aval(), (ValueError, AssertionError),
         ["(100, 100)", "(8, 64)", "(104, 128)"], "MGPU050"),
    case("indivisible_in_scratch", lambda: lower(dict(a=SMEM(
        (100, 100), F32, transforms=(plgpu.TilingTransform((8, 64)),)))),
         (ValueError, AssertionError),
         ["(100, 100)", "(8, 64)", "scratch_types['a']"], "MGPU050"),
    case("tiling_of_higher_rank", lambda: tiled((128,), (8, 64)),
         (ValueError, AssertionError), ["(8, 64)", "(128,)"], "MGPU050"),
    case("zero_tile", lambda: tiled((8, 64), (0, 64)),
         (ValueError, ZeroDivisionError), ["(0, 64)"], "MGPU053"),
    case("number_as_tiling", lambda: tiled((8, 64), 8), (ValueError, TypeError),
         ["tiling=8"], "MGPU053"),
    case("float_tile", lambda: tiled((8, 64), (8, 32.0)),
         (ValueError, TypeError), ["(8, 32.0)"], "MGPU053"),
    case("swizzle", lambda: swizzled((8, 32), 128), ValueError,
         ["Swizzle 128 requires the trailing dimension",
          "TilingTransform((8, 64))"],
         "MGPU052"),
    case("negative_dim", lambda: SMEM((-1,), F32), ValueError, ["(-1,)"],
         "MGPU051"),
    case("negative_gmem_dim", lambda: plgpu.GMEM((8, -1), F32), ValueError,
         ["(8, -1)"], "MGPU051"),
    case("negative_regs_dim", lambda: plgpu.REGS((8, -1), F32), ValueError,
         ["(8, -1)"], "MGPU051"),
    case("negative_tmem_dim", lambda: TMEM((128, -128), F32), ValueError,
         ["(128, -128)"], "MGPU051"),
    case("dtype_first", lambda: SMEM(F32, (8, 64)), (ValueError, TypeError),
         ["shape first", "SMEM((8, 64), dtype)"], "MGPU051",
         in_patches=False),
    case("number_as_shape", lambda: SMEM(128, F32), (ValueError, TypeError),
         ["shape=128", "(128,)"], "MGPU051"),
    case("text_as_shape", lambda: SMEM("128", F32), (ValueError, TypeError),
         ["shape='128'"], "MGPU051"),
    case("tiling_is_fine", lambda: tiled((16, 128), (8, 64))),
    case("batched_tiling_is_fine", lambda: tiled((3, 16, 128), (8, 64))),
    case("swizzle_is_fine", lambda: tiled(
        (16, 128), (8, 64), plgpu.SwizzleTransform(128))),
    case("iterator_as_shape_is_fine",
         lambda: check(SMEM(iter([4, 8]), F32).get_ref_aval().shape == (4, 8))),
    case("shape_is_fine", lambda: lower([SMEM([np.int64(8), 64], F32)])),
    case("tmem_is_fine", lambda: TMEM((128, 128), F32).get_ref_aval()),
]

KEYWORDS = [
    case("out_shape",
         lambda: plgpu.kernel(lambda o: None, out_shape=array()),
         (ValueError, TypeError), ["out_shape", "out_type"], "MGPU060",
         since="0.11.2"),
    case("scratch_shapes", lambda: plgpu.kernel(
        lambda o: None, out_type=array(), scratch_shapes=[B()]),
         TypeError, ["scratch_shapes", "scratch_types"], "MGPU060",
         since="0.11.2"),
    case("positional_out_shape",
         lambda: plgpu.kernel(lambda o: None, array()), TypeError,
         ["out_type=..."], "MGPU060", since="0.11.2", in_patches=False),
    case("misspelt", lambda: plgpu.kernel(
        lambda o: None, out_type=array(), num_thread=2), TypeError,
         ["'num_thread'", "'num_threads'"], "MGPU061"),
    case("unknown", lambda: plgpu.kernel(
        lambda o: None, out_type=array(), banana=2), TypeError,
         ["'banana'", "cluster_names"], "MGPU061"),
    case("decorator", lambda: plgpu.kernel(out_type=array(), banana=2),
         TypeError, ["'banana'"], "MGPU061"),
    case("mesh_keyword_is_fine", lambda: lower(kernel_name="copy")),
    case("decorator_is_fine", lambda: plgpu.kernel(out_type=array())(
        lambda o: None)),
]

GROUPS = dict(
    array_aval=ARRAY_AVALS,
    out_type=OUT_TYPES,
    scratch=SCRATCH,
    barriers=BARRIERS,
    cluster_barrier=AXES,
    barrier_index=INDICES,
    launch=LAUNCH,
    ref_union=UNIONS,
    smem=TRANSFORMS,
    kernel=KEYWORDS,
)
