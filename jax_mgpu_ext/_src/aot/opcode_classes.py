"""Which opcodes of PTX and SASS do the same kind of work.

The PTX opcodes are those of the PTX ISA manual, the chapter "Instruction Set".
The CUDA Binary Utilities manual lists SASS opcodes with a few words each; which
of them a PTX instruction becomes was seen with ptxas of CUDA 13 for sm_90a and
sm_100a, each PTX instruction compiled on its own.

In the kernels that ship with JAX 0.10.2, 0.11.2 and 0.12.0 both counts of a
class are equal, but for waits, fences, allocations and what is only there to
order others; the classes say why. In other code ptxas may unroll and merge.
"""

from __future__ import annotations

import functools
import re

# Class: what it counts in PTX, and in SASS. A pattern is matched from the
# opcode on, against `Instruction.text`; the first class that matches counts.
_PATTERNS: dict[str, tuple[str, str]] = {
    # mbarrier.init is SYNCS.EXCH. For sm_100, if the address is not uniform, it
    # is an ordinary STS.64, which is not counted.
    "mbarrier_init": (r"mbarrier\.init\b", r"SYNCS\.EXCH\b"),
    # expect_tx and complete_tx without an arrival.
    "mbarrier_tx": (
        r"mbarrier\.(?:expect|complete)_tx\b",
        r"SYNCS\.ARRIVE\S*\.A0T[RX]\b",
    ),
    # With arrive.expect_tx, arrive_drop and cp.async.mbarrier.arrive.
    "mbarrier_arrive": (
        r"mbarrier\.arrive|cp\.async\.mbarrier\.arrive\b",
        r"SYNCS\.ARRIVE\b|ARRIVES\b",
    ),
    # try_wait and test_wait. In SASS a loop over try_wait is about three: it
    # tries on the fast path, and tries, tests and sleeps in the loop.
    "mbarrier_wait": (r"mbarrier\.(?:try|test)_wait\b", r"SYNCS\.PHASECHK\b"),
    # Arrive and wait count one each. A cluster known at compile time is
    # assumed: for others ptxas adds a BAR.SYNC, for clusters of one block.
    "cluster_barrier": (r"barrier\.cluster\.", r"UCGABAR_(?:ARV|WAIT)\b"),
    # Barrier 0 of all threads, __syncthreads().
    "cta_barrier": (
        r"bar(?:rier)?\.(?:cta\.)?(?:(?:sync|arrive)\S* 0|red\S* [^,]+, 0)"
        r"(?=,|$)",
        r"BAR\.\S+ 0x0(?=,|$)",
    ),
    # bar.sync, bar.arrive and bar.red with another number, or one in a
    # register; not bar.warp.sync.
    "named_barrier": (
        r"bar(?:rier)?\.(?:cta\.)?(?:sync|arrive|red)\b",
        r"BAR\.(?:SYNC|ARV|RED|SCAN)\b",
    ),
    # Tensor or bulk, into the shared memory of several blocks at once.
    "tma_load_multicast": (
        r"cp\.async\.bulk\.(?:tensor\.\dd\.)?shared::cluster\.global\S*"
        r"\.multicast::cluster\b",
        r"(?:UTMALDG|UBLKCP)\.\S*\bMULTICAST\b",
    ),
    # Tensor or bulk, into shared memory: also of another block from ours.
    "tma_load": (
        r"cp\.async\.bulk\.(?:tensor\.\dd\.)?shared::(?:cta|cluster)\b",
        r"UTMALDG\b|UBLKCP\.S\b",
    ),
    "tma_store": (
        r"cp\.async\.bulk\.(?:tensor\.\dd\.)?global\b",
        r"UTMASTG\b|UBLKCP\.G\b",
    ),
    "tma_reduce": (r"cp\.reduce\.async\.bulk\b", r"UTMAREDG\b|UBLKRED\b"),
    # Of data into L2, and of tensor maps.
    "tma_prefetch": (
        r"cp\.async\.bulk\.prefetch\b|prefetch\.tensormap\b",
        r"UTMAPF\b|UBLKPF\b|UTMACCTL\.PF\b",
    ),
    # Commits of TMA stores and of cp.async; ptxas merges those in a row.
    "async_commit": (
        r"cp\.async\.(?:bulk\.)?commit_group\b",
        r"UTMACMDFLUSH\b|LDGDEPBAR\b",
    ),
    # DEPBAR also waits for other things, as in the allocation of TMEM.
    "async_wait": (r"cp\.async\.(?:bulk\.)?wait_(?:group|all)\b", r"DEPBAR\b"),
    "cp_async": (r"cp\.async\.c[ag]\b", r"LDGSTS\b"),
    # Stores into the shared memory of another block that arrive at a barrier.
    # In SASS also one, and two arrivals, of tcgen05.alloc for two blocks.
    "async_store": (r"(?:st|red)\.async\b", r"STAS\b|REDAS\b"),
    # The matrix multiplications alone, dense or sparse.
    "wgmma": (r"wgmma\.mma_async\b", r"[HIQB]GMMA\b"),
    # commit_group has no opcode in SASS: it is `gsb0` of the last HGMMA. ptxas
    # adds both others where it needs them, or serialises a kernel.
    "wgmma_sync": (
        r"wgmma\.(?:fence|commit_group|wait_group)\b",
        r"WARPGROUP\.(?:ARRIVE|DEPBAR)\b",
    ),
    # The matrix multiplications alone.
    "tcgen05": (r"tcgen05\.mma\b", r"UTC[A-Z]MMA\b"),
    "tcgen05_commit": (r"tcgen05\.commit\b", r"UTCBAR\b"),
    # To and from TMEM, and within it.
    "tcgen05_copy": (
        r"tcgen05\.(?:ld|st|cp|shift)\b",
        r"LDTM\b|STTM\b|UTCCP\b|UTCSHIFT\b",
    ),
    # An allocation is a loop of UTCATOMSWS, a dealloc one, and giving up the
    # right to allocate is UVIRTCOUNT.
    "tcgen05_alloc": (
        r"tcgen05\.(?:alloc|dealloc|relinquish_alloc_permit)\b",
        r"UTCATOMSWS\b|UVIRTCOUNT\b",
    ),
    # Most of these only order what ptxas emits, and leave nothing in SASS.
    "tcgen05_sync": (r"tcgen05\.(?:fence|wait)\b", r"FENCE\.VIEW\.ASYNC\.T\b"),
    # mma.sync of a single warp.
    "mma": (r"mma\.|wmma\.mma\b", r"[HIDQOB]MMA\b"),
    "matrix_load": (r"ldmatrix\b", r"LDSM\b"),
    "matrix_store": (r"stmatrix\b", r"STSM\b"),
    # In SASS a proxy fence is FENCE.VIEW.ASYNC after a MEMBAR, which counts as
    # `fence`, and one for tensor maps is UTMACCTL.IV. ptxas adds one where
    # barriers are initialised through registers that are not uniform.
    "fence_proxy": (r"fence\.proxy\b", r"FENCE\.VIEW\b|UTMACCTL\.IV\b"),
    # fence.mbarrier_init leaves nothing in SASS. Each release that reaches
    # beyond the block, as of barrier.cluster.arrive, adds a MEMBAR.
    "fence": (r"fence\b|membar\b", r"MEMBAR\b"),
    # Changes of how many registers a warpgroup has; none if ptxas ignores it.
    "setmaxnreg": (r"setmaxnreg\b", r"USETMAXREG\b"),
    # Asking for the next cluster to run, on Blackwell.
    "cluster_launch_control": (
        r"clusterlaunchcontrol\.try_cancel\b",
        r"UGETNEXTWORKID\b",
    ),
    # Local memory. PTX has virtual registers without limit, so there it is
    # only what the program keeps in memory; ptxas spills to it, too.
    "spill_load": (r"ld\.local\b", r"LDL\b"),
    "spill_store": (r"st\.local\b", r"STL\b"),
}

# The names of all classes, in the order of tables.
OPCODE_CLASSES = tuple(_PATTERNS)


@functools.cache
def _pattern(kind: str) -> re.Pattern[str]:
  column = ("ptx", "sass").index(kind)
  return re.compile("|".join(
      f"(?P<{name}>{patterns[column]})" for name, patterns in _PATTERNS.items()
  ))


def opcode_class(kind: str, text: str) -> str | None:
  """Returns the class of an instruction, None if it is in none.

  Args:
    kind: "ptx" or "sass".
    text: The instruction, without its predicate: `Instruction.text`.
  """
  match = _pattern(kind).match(text)
  return match and match.lastgroup
