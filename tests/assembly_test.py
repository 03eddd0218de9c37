"""Tests of reading, counting and comparing PTX and SASS.

`tests/data/assembly/` holds extracts of what JAX 0.12.0 and CUDA 13 made of two
kernels that ship with JAX.
"""

from __future__ import annotations

import pathlib
import pickle
import re
import types

from absl.testing import absltest
from absl.testing import parameterized
import hypothesis
from hypothesis import strategies as st

from jax_mgpu_ext._src.aot import assembly
from jax_mgpu_ext._src.aot import code_diff
from jax_mgpu_ext._src.aot import opcode_classes

_DATA = pathlib.Path(__file__).resolve().parent / "data" / "assembly"
_TEXTS = {p.name: p.read_text(encoding="utf-8") for p in _DATA.iterdir()}
_HOPPER = _TEXTS["hopper.ptx"]
_HOPPER_SASS = _TEXTS["hopper.sass_ctrl"]
_BLACKWELL_SASS = _TEXTS["blackwell.sass"]

_HEAD = ".version 9.0\n.target sm_90a\n.address_size 64\n"


def _ptx(body: str, head: str = ".visible .entry k()") -> str:
  return f"{_HEAD}{head}\n{{\n{body}\n}}\n"


def _sass(*lines: str) -> str:
  numbered = "\n".join(
      line if line.endswith(":") else f"        /*{16 * n:04x}*/  {line} ;"
      for n, line in enumerate(lines)
  )
  return (
      '\t.target\tsm_90a\n\t.section\t.text.k,"ax",@progbits\n'
      f"        .type           k,@function\nk:\n.text.k:\n{numbered}\n"
  )


def _parse(text: str) -> assembly.Assembly:
  if ".version" in text:
    return assembly.parse_ptx(text)
  return assembly.parse_sass(text)


def _only(text: str) -> assembly.Instruction:
  (instruction,) = _parse(text).instructions()
  return instruction


# What one instruction of PTX is, and what ptxas makes of it; empty if nothing.
_CLASSES = (
    ("mbarrier_init", "mbarrier.init.shared::cta.b64 [%r1], 4",
     "SYNCS.EXCH.64 URZ, [UR7], UR14"),
    ("mbarrier_tx", "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r1], %r2",
     "SYNCS.ARRIVE.TRANS64.RED.A0TR RZ, [R2+URZ], R3"),
    ("mbarrier_tx", "mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r1], 8",
     "SYNCS.ARRIVE.TRANS64.RED.A0TX RZ, [R2+URZ], R3"),
    ("mbarrier_arrive", "mbarrier.arrive.release.cta.shared::cta.b64 _, [%r1], 1",
     "SYNCS.ARRIVE.TRANS64.ART0 RZ, [R4+URZ+0x28400], R5"),
    ("mbarrier_arrive",
     "mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%r1], %r2",
     "SYNCS.ARRIVE.TRANS64 RZ, [UR17], R8"),
    ("mbarrier_arrive", "mbarrier.arrive_drop.shared::cta.b64 %rd3, [%r1]",
     "SYNCS.ARRIVE.TRANS64.OPTOUT.A1T0 RZ, [UR4], RZ"),
    ("mbarrier_arrive", "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r1]",
     "ARRIVES.LDGSTSBAR.64.ARVCNT [UR4]"),
    ("mbarrier_wait", "mbarrier.try_wait.parity.shared.b64 P1, [%r1], %r2, %r3",
     "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R3+URZ+0x8], R2"),
    ("mbarrier_wait", "mbarrier.test_wait.shared::cta.b64 %p1, [%r1], %rd3",
     "SYNCS.PHASECHK.TRANS64 P1, [R15+URZ], R10"),
    ("cluster_barrier", "barrier.cluster.arrive.relaxed.aligned", "UCGABAR_ARV"),
    ("cluster_barrier", "barrier.cluster.wait", "UCGABAR_WAIT"),
    ("cta_barrier", "bar.sync 0", "BAR.SYNC.DEFER_BLOCKING 0x0"),
    ("cta_barrier", "barrier.cta.sync.aligned 0, 64",
     "BAR.SYNC.DEFER_BLOCKING 0x0, 0x40"),
    ("cta_barrier", "bar.red.popc.u32 %r3, 0, %p1",
     "BAR.RED.POPC.DEFER_BLOCKING 0x0, P0"),
    ("named_barrier", "bar.sync %r1, 128", "BAR.SYNC.DEFER_BLOCKING R0, 0x80"),
    ("named_barrier", "barrier.sync 01, 128", "BAR.SYNC.DEFER_BLOCKING 0x10"),
    ("named_barrier", "bar.arrive 1, 128", "BAR.ARV 0x1, 0x80"),
    ("named_barrier", "bar.red.popc.u32 %r3, 1, %p1",
     "BAR.RED.POPC.DEFER_BLOCKING 0x1, P0"),
    ("tma_load_multicast",
     "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx"
     "::bytes.multicast::cluster [%r1], [%rd1, {%r1,%r2}], [%r3], %rs1",
     "UTMALDG.2D.MULTICAST [UR8], [UR26], UR22"),
    ("tma_load_multicast",
     "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
     ".multicast::cluster [%r1], [%rd1], %r2, [%r3], %rs1",
     "UBLKCP.S.G.MULTICAST [UR8], [UR4], UR6, UR7"),
    ("tma_load",
     "cp.async.bulk.tensor.4d.shared::cta.global.tile.mbarrier::complete_tx"
     "::bytes.cta_group::2 [%r1], [%rd1, {%r1,%r2,%r3,%r4}], [%r3]",
     "UTMALDG.4D.2CTA [UR72], [UR62]"),
    ("tma_load",
     "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
     " [%r1], [%r2], %r2, [%r3]",
     "UBLKCP.S.S [UR4], [UR6], UR7"),
    ("tma_store",
     "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%rd1, {%r1}], [%r2]",
     "UTMASTG.4D [UR24], [UR4]"),
    ("tma_store", "cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r1], %r2",
     "UBLKCP.G.S [UR4], [UR6], UR7"),
    ("tma_reduce",
     "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group"
     " [%rd1, {%r1,%r2}], [%r1]",
     "UTMAREDG.2D.ADD [UR4], [UR6]"),
    ("tma_reduce",
     "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%rd1], [%r1], 4",
     "UBLKRED.G.S.ADD [UR4], [UR6], UR7"),
    ("tma_prefetch", "prefetch.tensormap [%rd1]", "UTMACCTL.PF [UR20]"),
    ("tma_prefetch",
     "cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%rd1, {%r1,%r2}]",
     "UTMAPF.L2.2D [UR4], [UR6]"),
    ("async_commit", "cp.async.bulk.commit_group", "UTMACMDFLUSH"),
    ("async_commit", "cp.async.commit_group", "LDGDEPBAR"),
    ("async_wait", "cp.async.bulk.wait_group.read 1", "DEPBAR.LE SB0, 0x1"),
    ("async_wait", "cp.async.wait_all", "DEPBAR.LE SB0, 0x0"),
    ("cp_async", "cp.async.cg.shared.global [%r1], [%rd1], 16",
     "LDGSTS.E.BYPASS.128 [R5], desc[UR4][R2.64]"),
    ("async_store",
     "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r1], %r2, [%r3]",
     "STAS [R8.64], R6"),
    ("wgmma",
     "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f1}, %rd1, %rd2, p, 1",
     "HGMMA.64x128x16.F32 R88, gdesc[UR8].tnspB, R88"),
    ("wgmma",
     "wgmma.mma_async.sp.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%f1}, %rd1, %rd2",
     "QGMMA.SP.64x8x32.F32.E4M3.E4M3 R8, gdesc[UR4], R8, gsb0"),
    ("wgmma_sync", "wgmma.fence.sync.aligned", "WARPGROUP.ARRIVE"),
    ("wgmma_sync", "wgmma.wait_group.sync.aligned 0",
     "WARPGROUP.DEPBAR.LE gsb0, 0x0"),
    ("wgmma_sync", "wgmma.commit_group.sync.aligned", ""),
    ("tcgen05", "tcgen05.mma.cta_group::2.kind::f16 [%r1], %rd1, %rd2, %r2, %p1",
     "UTCHMMA.2CTA gdesc[UR8], gdesc[UR28], tmem[UR36], tmem[UR16], idesc[UR17]"),
    ("tcgen05_commit",
     "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r1]",
     "UTCBAR [UR4], URZ"),
    ("tcgen05_copy", "tcgen05.ld.sync.aligned.16x256b.x8.b32 {%r3}, [%r1]",
     "LDTM.16dp256bit.x8 R36, tmem[UR6]"),
    ("tcgen05_copy", "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r1], {%r3}",
     "STTM tmem[UR4], R3"),
    ("tcgen05_alloc",
     "tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%r1], 64",
     "UTCATOMSWS.2CTA.FIND_AND_SET.ALIGN UP0, UR4, UR4"),
    ("tcgen05_alloc", "tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned",
     "UVIRTCOUNT.DEALLOC.SMPOOL 0x80"),
    ("tcgen05_sync", "tcgen05.wait::st.sync.aligned", "FENCE.VIEW.ASYNC.T"),
    ("tcgen05_sync", "tcgen05.fence::after_thread_sync", ""),
    ("mma", "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%f1}, {%r1}, {%r3}",
     "HMMA.1688.F32 R4, R8, R10, R4"),
    ("matrix_load", "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r3}, [%r1]",
     "LDSM.16.M88 R4, [R2]"),
    ("matrix_store", "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%rd2], {%r1,%r2}",
     "STSM.16.M88.4 [R80+0x10000], R36"),
    ("fence_proxy", "fence.proxy.async.shared::cta", "FENCE.VIEW.ASYNC.S"),
    ("fence_proxy",
     "fence.proxy.tensormap::generic.acquire.gpu [%rd1], 128",
     "UTMACCTL.IV [UR4]"),
    ("fence", "fence.acq_rel.gpu", "MEMBAR.ALL.GPU"),
    ("fence", "membar.cta", "MEMBAR.SC.CTA"),
    ("fence", "fence.mbarrier_init.release.cluster", ""),
    ("setmaxnreg", "setmaxnreg.inc.sync.aligned.u32 232",
     "USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xe8"),
    ("cluster_launch_control",
     "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx"
     "::bytes.multicast::cluster::all.b128 [%r1], [%r2]",
     "UGETNEXTWORKID.BROADCAST [UR14], [UR15]"),
    ("spill_load", "ld.local.u32 %r3, [%rd1]", "LDL R3, [R1]"),
    ("spill_store", "st.local.v4.f32 [%rd2+16], {%f8, %f7}", "STL.64 [R1+0x8], R2"),
    # And what looks like one of them.
    (None, "bar.warp.sync %r1", "WARPSYNC.ALL"),
    (None, "ld.shared.b32 %r1, [%r2]", "LDLOCK R1"),
    (None, "mbarrier.inval.shared::cta.b64 [%r1]", "SYNCS.CCTL.IV [R2+URZ]"),
    (None, "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p1, handle",
     "NANOSLEEP.SYNCS 0x989680"),
)

# Text, the line, what is said of it.
_BAD_PTX = {
    "empty": ("", 1, r"expected \.version, but there is nothing more"),
    "no_version": (
        ".target sm_90a\n.visible .entry k() { ret; }", 1, r"expected \.version"
    ),
    "no_target": (
        ".version 9.0\n.visible .entry k() { ret; }", 1, r"expected \.target"
    ),
    "no_function": (_HEAD, 4, "expected a function, but there is nothing more"),
    "prototype_only": (f"{_HEAD}.extern .func f(.param .b32 x);", 4, "a function"),
    "words": (f"{_HEAD}hello\nworld;", 4, r"expected a directive, got 'hello world"),
    "cut_in_head": (f"{_HEAD}.visible .entry k(", 4, "a directive that ends with ';'"),
    "cut_in_body": (
        _ptx("ret;")[:-2], 7, r"expected '}' at the end of 'k', but there is noth"
    ),
    "cut_in_block": (_ptx("{ ret;"), 8, r"expected '}' at the end of 'k', but"),
    "cut_in_comment": (_ptx("ret; /* "), 8, r"'}' at the end"),
    "no_semicolon": (
        _ptx("ret;\nmov.b32 %r1, 0\n") + _ptx("ret;"), 7,
        r"an instruction that ends with ';', got 'mov\.b32",
    ),
    "no_instruction": (_ptx("ret;\n\n+-;"), 8, r"an instruction, got '\+-;"),
    "bad_opcode": (_ptx("mov!b32 %r1, 0;"), 6, "an instruction, got 'mov!b32"),
    "bad_loc": (_ptx(".loc x 1\nret;"), 6, r"\.loc with a file and a line"),
    "cut_section": (
        _ptx("ret;") + ".section .debug_str {\n.b8 1", 8, "a section with a body"
    ),
}
_GOOD_PTX = {
    "smallest": _ptx("ret;"),
    "blocks": _ptx("{ { ret; } }"),
    "comments": _ptx("/* } */ ret; // }\n/*"[:-2]),
    "strings": _ptx('.pragma "a;b";\nret;'),
    "section": _ptx("ret;") + '.section .debug_str { $L: .b8 1\n}\n.file 1 "x"',
    "prototype": _ptx("ret;", ".extern .func f(.param .b32 x);\n.entry k"),
    "loc": _ptx(".loc 1 1 1, function_name $L, inlined_at 1 2 3\nret;"),
    "empty_statement": _ptx("; ret;"),
    "carriage_returns": _ptx("mov.b32 %r1, 0;\nret;").replace("\n", "\r\n"),
}

_SASS = _sass("NOP", "EXIT")
_BAD_SASS = {
    "empty": ("", 1, "expected a function in a section .text, but there is nothin"),
    "no_code": (_SASS.replace(".text.k,", ".data,"), 8, "a function in a section"),
    "no_name": (
        _SASS.replace("\nk:\n.text.k:", ""), 4, "expected the name of a function"
    ),
    "cut": (
        _SASS[: _SASS.rindex(" ;")], 7, "an instruction that ends with ';', got 'EXI"
    ),
    "not_an_instruction": (
        _SASS.replace("EXIT", "exit!"), 7, "expected an instruction, got 'exit! ;'"
    ),
    "words": (
        _SASS.replace("        /*0010*/", "hello"), 7,
        "expected an instruction, a label or a directive, got 'hello",
    ),
}

# Changes that leave the normal form as it is: pattern, replacement.
_NO_CHANGES = {
    "kernel_name": ("anonymous_mosaic_gpu_kernel", "renamed"),
    "registers": (r"%(rd|rs|r|p)(\d+)\b", r"%\g<1>1\2"),
    "labels": (r"\$L__BB0_", "$other_"),
    "no_line_info": (r"\n\s*\.loc[^\n]*|\n\$L__(?:tmp|func)\w+:", ""),
    "lines": (r"\.loc(\s+)1 (\d+)", r".loc\g<1>1 1\2"),
    "path": (r"kernel\.py", "/elsewhere/kernel.py"),
    "comments": (r"//[^\n]*", "/* \n */"),
    "variable_name": ("__dynamic_shmem__0", "smem"),
    "spaces": (r",", " ,\t "),
    "isa_version": (r"\.version 9\.0", ".version 9.1"),
}
# Changes that do not, and a line of the diff that tells.
_CHANGES = {
    "target": ("sm_90a", "sm_100a", r"\+\.target sm_100a"),
    "maxntid": ("maxntid 384", "maxntid 256", r"\+\.maxntid 256, 1, 1"),
    "cluster": (
        "reqnctapercluster 2, 1", "reqnctapercluster 1, 2",
        r"-\.reqnctapercluster 2, 1, 1",
    ),
    "less_directives": (r"\.explicitcluster\n", "", r"-\.explicitcluster"),
    "parameter": (r"\[384\]", "[512]", r"\+\.param \.align 64 \.b8 \$S0\[512\]"),
    "alignment": (r"\.shared \.align 16", ".shared .align 8", r"\+\.shared \.align 8"),
    "pragma": (
        r"\n\$L__BB0_5:", '\n$L__BB0_5:\n.pragma "nounroll";', r'\+\.pragma "nounroll"'
    ),
    "opcode": (r"bar\.sync \t0", "bar.arrive \t0", r"\+bar\.arrive 0"),
    "modifier": (r"\.multicast::cluster", "", r"-@%p\d+ cp\S*\.multicast::cluster"),
    "immediate": (r"229376", "229377", r"\+add\.s32 %r\d+, %r\d+, 229377"),
    "predicate": (r"@!%p12 bra", "@%p12 bra", r"\+@%p\d+ bra \$L0"),
    "branch": (r"bra \t\$L__BB0_4", "bra \t$L__BB0_1", r"\+@%p\d+ bra \$L0"),
    "label": (
        r"(\$L__BB0_5:\n)(.*\n.*add.*\n)", r"\2\1", r"-\$L\d+:"
    ),
    "order": (
        r"(barrier\.cluster\.arrive\.relaxed\.aligned);([^;]*)(barrier[^;]*);",
        r"\3;\2\1;", r"-barrier\.cluster\.arrive",
    ),
    "other_register": (r"(mov\.b64 \t%rd16,.*\n.*)%rd16", r"\1%rd12", r".*cvt\.u32"),
    "special_register": (r"%tid\.x", "%tid.y", r"\+mov\.u32 %r\d+, %tid\.y"),
    "one_less": (r"\tfence\.proxy\.async\.shared::cta;\n", "", r"-fence\.proxy"),
}


class ParsePtxTest(parameterized.TestCase):

  def test_kernel(self):
    kernel = assembly.parse_ptx(_HOPPER)
    self.assertEqual(
        (kernel.kind, kernel.target, kernel.version), ("ptx", "sm_90a", "9.0")
    )
    (function,) = kernel.functions
    self.assertEqual(function.name, "anonymous_mosaic_gpu_kernel")
    self.assertEqual(function.attributes, {
        "maxntid": (384, 1, 1),
        "minnctapersm": (1,),
        "explicitcluster": (),
        "reqnctapercluster": (2, 1, 1),
    })
    self.assertEqual(function.directives, (
        ".visible .entry",
        ".param .align 64 .b8 anonymous_mosaic_gpu_kernel_param_0[384]",
        ".shared .align 16 .b8 __dynamic_shmem__0",
    ))
    self.assertEqual(function.instructions[0], assembly.Instruction(
        opcode="mov",
        modifiers=("b64",),
        operands="%rd15, anonymous_mosaic_gpu_kernel_param_0",
        source=assembly.SourceLine(file="kernel.py", line=208),
    ))

  def test_inline_assembly(self):
    instructions = list(_parse(_ptx("""
        .loc 1 0 0
        // begin inline asm
        {
        .reg .pred       P1;
        LAB_WAIT:
        mbarrier.try_wait.parity.shared.b64 P1, [%r1], %r2, %r3;
        @P1 bra.uni DONE;
        bra.uni     LAB_WAIT;
        DONE:
        }
        // end inline asm
        { .reg .pred p; setp.ne.b32 p, 1, 0; @!p mov.b32 {%r1,
          %r2 }, %rd1; }
        ret;
    """)).instructions())
    self.assertEqual(
        [f"{i.predicate} {i.text}" for i in instructions],
        [
            " mbarrier.try_wait.parity.shared.b64 P1, [%r1], %r2, %r3",
            "P1 bra.uni DONE", " bra.uni LAB_WAIT", " setp.ne.b32 p, 1, 0",
            "!p mov.b32 {%r1, %r2 }, %rd1", " ret",
        ],
    )
    self.assertEqual({i.source for i in instructions}, {None})

  def test_labels(self):
    kernel = _parse(_ptx("$A: $B:\nmov.b32 a, b;\nL1: ret;\nend:"))
    self.assertEqual(
        kernel.functions[0].labels, ((0, "$A"), (0, "$B"), (1, "L1"), (2, "end"))
    )

  def test_functions_and_variables(self):
    kernel = _parse(
        _HEAD + """
        .extern .func (.param .b32 r) vprintf ( .param .b64 a, .param .b64 b );
        .global .align 1 .b8 $str[4] = {37, 102, 10};
        .extern .shared .align 16 .b8 dyn[];
        .func (.param .b32 r) f(.param .b32 p) { ret; }
        .entry k(.param .u64 .ptr .align 16 p) .maxntid 1 .noreturn
        { { // callseq
          .param .b32 q; call.uni (q),
          f, (p); } }
        """
    )
    self.assertEqual([f.name for f in kernel.functions], ["f", "k"])
    self.assertLen(kernel.directives, 3)
    f, k = kernel.functions
    self.assertEqual(f.directives, (".func", ".param .b32 r", ".param .b32 p"))
    self.assertEqual(k.attributes, {"maxntid": (1,), "noreturn": ()})
    self.assertEqual(k.instructions[0].text, "call.uni (q), f, (p)")

  def test_source_of_inlined_code_is_its_definition(self):
    self.assertEqual(
        _only(_GOOD_PTX["loc"] + '.file 1 "x"').source,
        assembly.SourceLine(file="x", line=1),
    )

  def test_several_modules(self):
    modules = [
        _ptx(".loc 1 5 0\n.shared .b8 s[4];\nmov.b32 %r1, s;")
        + f'.file 1 "{path}"\n'
        for path in "ab"
    ]
    joined = _parse("".join(modules))
    self.assertLen(joined.functions, 2)
    self.assertEqual([i.source.file for i in joined.instructions()], ["a", "b"])
    modules[1] = re.sub(r"\bk\b", "other", modules[1]).replace(", s;", ", t;")
    modules[1] = modules[1].replace(" s[", " t[")
    self.assertEmpty(assembly.diff(joined, _parse("".join(modules))))

  @parameterized.named_parameters((k, *v) for k, v in _BAD_PTX.items())
  def test_error(self, text, line, message):
    with self.assertRaisesRegex(
        assembly.AssemblyError, f"^line {line}: .*{message}"
    ) as caught:
      assembly.parse_ptx(text)
    self.assertEqual(caught.exception.line, line)
    again = pickle.loads(pickle.dumps(caught.exception))
    self.assertEqual(str(again), str(caught.exception))

  @parameterized.named_parameters(_GOOD_PTX.items())
  def test_no_error(self, text):
    self.assertNotEmpty(list(assembly.parse_ptx(text).instructions()))


class ParseSassTest(parameterized.TestCase):

  def test_dump_with_control_codes(self):
    kernel = assembly.parse_sass(_HOPPER_SASS)
    self.assertEqual(
        (kernel.kind, kernel.target, kernel.version), ("sass", "sm_90a", "")
    )
    (function,) = kernel.functions
    self.assertEqual(function.name, "anonymous_mosaic_gpu_kernel")
    self.assertEqual(
        function.instructions[0],
        assembly.Instruction(opcode="LDC", operands="R1, c[0x0][0x28]"),
    )
    self.assertIn(
        assembly.Instruction(
            opcode="SYNCS", modifiers=("EXCH", "64"),
            operands="URZ, [UR7], UR14", predicate="UP0",
        ),
        function.instructions,
    )

  def test_hex_and_several_functions(self):
    kernel = assembly.parse_sass(_BLACKWELL_SASS)
    self.assertEqual(kernel.target, "sm_100a")
    names = [f.name for f in kernel.functions]
    self.assertEqual(names[0], "kernel_mosaic_gpu_kernel")
    self.assertLen(names, 3)
    self.assertIn("guardrail_trap", names[2])
    self.assertEqual(
        [i.text for i in kernel.functions[1].instructions],
        ["BPT.TRAP 0x1", "IMAD.MOV.U32 R3, RZ, RZ, 0x0",
         "RET.REL.NODEC R2 `(kernel_mosaic_gpu_kernel)"],
    )

  def test_lines(self):
    kernel = assembly.parse_sass(_TEXTS["hopper_lines.sass"])
    self.assertEqual(
        {str(i.source.file) for i in kernel.instructions()}, {"kernel.py"}
    )
    (read,) = [i for i in kernel.instructions() if "SR_CTAID" in i.operands]
    self.assertEqual(read.source.line, 155)

  def test_source_of_inlined_code_is_its_definition(self):
    text = _sass("NOP").replace(
        ".text.k:\n",
        '.text.k:\n\t//## File "a", line 3 inlined at "b", line 5\n'
        '\t//## File "b", line 5\n',
    )
    self.assertEqual(_only(text).source, assembly.SourceLine(file="a", line=3))

  def test_register_columns_are_left_out(self):
    self.assertEqual(
        _only(_sass("FADD R1, R2, R3").replace(" ;", " ;  // |  2 ^ :")).text,
        "FADD R1, R2, R3",
    )

  @parameterized.named_parameters((k, *v) for k, v in _BAD_SASS.items())
  def test_error(self, text, line, message):
    self.assertLen(list(assembly.parse_sass(_SASS).instructions()), 2)
    with self.assertRaisesRegex(
        assembly.AssemblyError, f"^line {line}: .*{message}"
    ):
      assembly.parse_sass(text)


class CountsTest(parameterized.TestCase):

  @parameterized.parameters(*_CLASSES)
  def test_class(self, name, ptx, sass):
    self.assertEqual(opcode_classes.opcode_class("ptx", ptx), name)
    expected = {name: 1} if name else {}
    texts = [_ptx(f"@%p1 {ptx};")] + ([_sass(f"@!UP1 {sass}")] if sass else [])
    for text in texts:
      counts = _parse(text).class_counts()
      self.assertEqual({k: n for k, n in counts.items() if n}, expected)
      self.assertEqual(tuple(counts), assembly.OPCODE_CLASSES)

  def test_every_class_has_both_examples(self):
    for column in (1, 2):
      self.assertEqual(
          {row[0] for row in _CLASSES if row[0] and row[column]},
          set(assembly.OPCODE_CLASSES),
      )

  @parameterized.parameters(*_TEXTS)
  def test_kernels(self, name):
    counts = _parse(_TEXTS[name]).class_counts()
    if name.startswith("hopper."):
      present = "tma_load_multicast wgmma setmaxnreg"
      absent = "tcgen05 tcgen05_copy cluster_launch_control"
    elif name.startswith("blackwell"):
      present = "tcgen05 tcgen05_copy tcgen05_alloc cluster_launch_control"
      absent = "wgmma wgmma_sync tma_load_multicast"
    else:
      return
    if name == "hopper.sass_ctrl":
      present = present.replace(" setmaxnreg", "")
    present += " mbarrier_init mbarrier_wait cluster_barrier cta_barrier"
    for key in present.split():
      self.assertGreater(counts[key], 0, key)
    for key in absent.split() + ["spill_load", "spill_store"]:
      self.assertEqual(counts[key], 0, key)

  def test_opcodes(self):
    kernel = _parse(_ptx("bar.sync 0; @%p1 bar.sync 0; ret;"))
    self.assertEqual(kernel.opcode_counts(), {"bar.sync": 2, "ret": 1})


class CompareTest(parameterized.TestCase):

  @parameterized.named_parameters((k, *v) for k, v in _NO_CHANGES.items())
  def test_no_change(self, pattern, replacement):
    changed = re.sub(pattern, replacement, _HOPPER)
    self.assertNotEqual(changed, _HOPPER)
    self.assertEmpty(assembly.diff(_parse(_HOPPER), _parse(changed)))
    assembly.assert_same_code(_HOPPER, changed)

  @parameterized.named_parameters((k, *v) for k, v in _CHANGES.items())
  def test_change(self, pattern, replacement, line):
    changed = re.sub(pattern, replacement, _HOPPER, count=1)
    self.assertNotEqual(changed, _HOPPER)
    lines = assembly.diff(_parse(_HOPPER), _parse(changed))
    self.assertTrue(any(re.match(line, x) for x in lines), "\n".join(lines))
    with self.assertRaisesRegex(AssertionError, "expected the same code, got"):
      assembly.assert_same_code(_HOPPER, changed)

  def test_diff_names_registers_alike(self):
    a = _ptx("mov.b32 %r1, 1;\nbar.sync 0;\nadd.s32 %r2, %r1, 2;\nret;")
    b = a.replace("bar", "mov.b32 %r9, 5;\nbar")
    self.assertEqual(assembly.diff(_parse(a), _parse(b)), (
        "--- a", "+++ b", "@@ -2,6 +2,7 @@",
        " $F0:", " .visible .entry", " mov.b32 %r0, 1", "+mov.b32 %r1', 5",
        " bar.sync 0", " add.s32 %r1, %r0, 2", " ret",
    ))

  def test_swapped_registers_are_a_difference(self):
    a = "mov.b32 %r1, %tid.x;\nmov.b32 %r2, %tid.x;\nsub.s32 %r3, %r1, %r2;\n"
    b = a.replace("%r1, %r2", "%r2, %r1")
    self.assertContainsSubset(
        {"-sub.s32 %r2, %r0, %r1", "+sub.s32 %r2, %r1, %r0"},
        assembly.diff(_parse(_ptx(a)), _parse(_ptx(b))),
    )

  def test_special_registers_keep_their_numbers(self):
    a, b = (_ptx(f"mov.b32 %r1, %envreg{n};") for n in (1, 2))
    self.assertIn("+mov.b32 %r0, %envreg2", assembly.diff(_parse(a), _parse(b)))

  def test_externals_keep_their_names(self):
    a = f"{_HEAD}.extern .func f(.param .b32 x);\n.entry k() {{ call f; }}"
    b = a.replace("f(", "g(").replace("call f", "call g")
    self.assertIn("+call g", assembly.diff(_parse(a), _parse(b)))

  def test_functions_are_named_in_order(self):
    a = f"{_HEAD}.func f() {{ ret; }} .entry k() {{ call f; }}"
    b = re.sub(r"\bf\b", "other", a)
    self.assertNotEqual(a, b)
    self.assertEmpty(assembly.diff(_parse(a), _parse(b)))

  @parameterized.parameters(
      ("R4", "R5"), ("UR22", "UR23"), ("0x80", "0x81"), ("UTMACMDFLUSH", "NOP"),
      (r"@P1 BRA", "@!P1 BRA"), (r"BRA `\(.L_x_2\)", "BRA `(.L_x_0)"),
      (r"(\.L_x_0:\n)(.*\n)", r"\2\1"),
  )
  def test_change_of_sass(self, pattern, replacement):
    changed = re.sub(pattern, replacement, _HOPPER_SASS.replace("R7", "R4"))
    self.assertNotEmpty(assembly.diff(_parse(_HOPPER_SASS), _parse(changed)))

  def test_no_change_of_sass(self):
    changed = _HOPPER_SASS
    for label in re.findall(r"(?m)^(\.L\w+):", changed):
      changed = re.sub(rf"\{label}\b", label.replace("_x_", "_y_1"), changed)
    changed = re.sub(r"\n\.L_y_157:|(?<=\d\d)\n.*NOP *$", "", changed)
    changed = changed.replace("anonymous", "other").replace("R9,", "R9.reuse,")
    # Control codes, and a kernel without the last NOP.
    changed = re.sub(r"[-\d]:[-\d]:[-\d]:[-Y]:\d\d", "1:2:3:Y:04", changed)
    self.assertNotEqual(changed, _HOPPER_SASS)
    assembly.assert_same_code(_HOPPER_SASS, changed)
    plain = re.sub(
        r"(?m)^ *1:2:3:Y:04( +/\*.*\S) *$", r"\1 ;", changed
    )
    self.assertNotEqual(changed, plain)
    assembly.assert_same_code(changed, plain)

  def test_many_instructions(self):
    lines = [
        f"add.s32 %r{n}, %r{n // 2}, {n % 97};\n"
        "{ .reg .pred p; W: @p bra W; }"
        for n in range(1, 25_000)
    ]
    a = _parse(_ptx("\n".join(lines)))
    lines[9_000] = "mov.b32 %r9000, 7;"
    lines.insert(20_000, "mov.b32 %r99999, 8;")
    b = _parse(_ptx("\n".join(lines)))
    self.assertLen(list(a.instructions()), 2 * 24_999)
    self.assertLess(len(assembly.diff(a, b)), 30)
    # Hardly anything in common: alignment gives up.
    c = _parse(_ptx("\n".join(
        f"{'and' if n * n % 7 < 3 else 'bar'}.b32 %r{n}, {n};"
        for n in range(50_000)
    )))
    self.assertGreater(len(assembly.diff(a, c)), 90_000)

  @hypothesis.given(st.data())
  @hypothesis.settings(deadline=None, max_examples=100)
  def test_alignment(self, data):
    lines = st.lists(st.sampled_from("abcd"), max_size=12)
    a, b = data.draw(lines), data.draw(lines)
    pairs = code_diff._aligned(a, b)
    self.assertEqual([a[i] for i, _ in pairs], [b[j] for _, j in pairs])
    for k in (0, 1):
      numbers = [pair[k] for pair in pairs]
      self.assertEqual(numbers, sorted(set(numbers)))
    self.assertLen(pairs, _longest_common(a, b))

  @hypothesis.given(
      st.lists(st.sampled_from("abcd")), st.lists(st.sampled_from("abcd"))
  )
  @hypothesis.settings(deadline=None, max_examples=100)
  def test_hunks(self, a, b):
    lines = code_diff._unified(a, b, code_diff._aligned(a, b))
    self.assertEqual(not lines, a == b)
    # Puts the hunks in, from the last on, which must give `b`.
    patched = list(a)
    heads = [n for n, line in enumerate(lines) if line.startswith("@@")]
    for head, end in reversed(list(zip(heads, [*heads[1:], len(lines)]))):
      numbers = re.findall(r"\d+", lines[head])
      start, removed, new_start, added = map(int, numbers)
      hunk = lines[head + 1 : end]
      old = [line[1] for line in hunk if line[0] != "+"]
      new = [line[1] for line in hunk if line[0] != "-"]
      self.assertEqual(old, a[start - 1 : start - 1 + removed])
      self.assertEqual(new, b[new_start - 1 : new_start - 1 + added])
      patched[start - 1 : start - 1 + removed] = new
    self.assertEqual(patched, b)


def _longest_common(a, b) -> int:
  table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
  for i, x in enumerate(a):
    for j, y in enumerate(b):
      table[i + 1][j + 1] = (
          table[i][j] + 1 if x == y else max(table[i][j + 1], table[i + 1][j])
      )
  return table[-1][-1]


class AssertionsTest(parameterized.TestCase):

  def test_same_code_takes_kernels(self):
    kernel = types.SimpleNamespace(ptx=_HOPPER, sass=_HOPPER_SASS)
    assembly.assert_same_code(kernel, _HOPPER)
    assembly.assert_same_code(kernel, _parse(_HOPPER))
    assembly.assert_same_code(_HOPPER_SASS, _parse(_HOPPER_SASS))

  def test_same_code_says_where(self):
    with self.assertRaises(AssertionError) as caught:
      assembly.assert_same_code(_HOPPER, _TEXTS["blackwell.ptx"])
    lines = str(caught.exception).splitlines()
    self.assertLen(lines, 42)
    self.assertRegex(
        lines[0], r"^expected the same code, got \d+ lines less and \d+ more:$"
    )
    self.assertEqual(lines[4:6], ["-.target sm_90a", "+.target sm_100a"])
    self.assertRegex(lines[-1], r"^\(\d+ more lines\)$")

  def test_contains(self):
    kernel = types.SimpleNamespace(ptx=_HOPPER, sass=_HOPPER_SASS)
    assembly.assert_contains(kernel, "UTMALDG.*MULTICAST")
    assembly.assert_contains(kernel, r"^UTMALDG\.4D\.MULTICAST \[", count=1)
    assembly.assert_contains(kernel, "UTMAREDG", count=0)
    assembly.assert_lacks(kernel, "wgmma")
    for other in (
        types.SimpleNamespace(ptx=_HOPPER, sass=""),
        types.SimpleNamespace(ptx=_HOPPER),
        _HOPPER,
        _parse(_HOPPER),
    ):
      assembly.assert_contains(other, r"^wgmma\.mma_async")
      assembly.assert_lacks(other, "HGMMA")

  @parameterized.parameters(
      (assembly.assert_contains, "UTMALDG.*MULTCAST", {},
       r"expected an instruction that matches 'UTMALDG\.\*MULTCAST' in the SASS"
       r" for sm_90a \(\d+ instructions\), got none; nearest opcodes:"
       r" UTMALDG\.4D\.MULTICAST"),
      (assembly.assert_contains, "HGMMA", {"count": 1},
       r"expected 1 instruction matching 'HGMMA' .*, got 2: HGMMA.* R88; HGMMA"),
      (assembly.assert_contains, "NOP", {"count": 0}, "0 instructions .*got 6: NOP"),
      (assembly.assert_lacks, "NOP", {},
       r"no instruction that matches 'NOP' in the .*, got 6: NOP; NOP; NOP; \.\.\."),
  )
  def test_fails(self, function, pattern, options, message):
    with self.assertRaisesRegex(AssertionError, message):
      function(_HOPPER_SASS, pattern, **options)

  @parameterized.parameters(
      ("(", {}, "expected a regular expression, got '\\(': missing"),
      ("", {}, "expected a regular expression that is not empty, got ''"),
      (None, {}, "that is not empty, got None"),
      ("a", {"count": -1}, "expected count as an integer from 0, got -1"),
      ("a", {"count": True}, "expected count as an integer from 0, got True"),
  )
  def test_bad_arguments(self, pattern, options, message):
    with self.assertRaisesRegex(ValueError, message):
      assembly.assert_contains(_HOPPER_SASS, pattern, **options)

  @parameterized.parameters(
      3, None, types.SimpleNamespace(ptx=""), types.SimpleNamespace(ptx=1)
  )
  def test_not_a_kernel(self, kernel):
    with self.assertRaisesRegex(TypeError, r"expected an Assembly, a PTX or SASS"):
      assembly.assert_contains(kernel, "a")
    with self.assertRaisesRegex(TypeError, r"an object with one as \.ptx, got"):
      assembly.assert_same_code(kernel, _HOPPER)

  def test_two_kinds(self):
    with self.assertRaisesRegex(ValueError, "both as SASS, got PTX and SASS"):
      assembly.assert_same_code(_HOPPER, _HOPPER_SASS)

  def test_unreadable_text(self):
    with self.assertRaisesRegex(assembly.AssemblyError, "line 1: expected"):
      assembly.assert_contains("hello", "a")


class FuzzTest(parameterized.TestCase):

  def _read(self, text: str) -> None:
    for parse in (assembly.parse_ptx, assembly.parse_sass):
      try:
        kernel = parse(text)
      except assembly.AssemblyError as error:
        self.assertBetween(error.line, 1, text.count("\n") + 1)
        continue
      kernel.class_counts()
      kernel.opcode_counts()
      other = _parse(_HOPPER if kernel.kind == "ptx" else _HOPPER_SASS)
      self.assertEqual(
          not assembly.diff(kernel, other),
          assembly.normal_form(kernel) == assembly.normal_form(other),
      )

  @hypothesis.given(st.text() | st.binary().map(lambda b: b.decode("latin-1")))
  @hypothesis.settings(deadline=None, max_examples=100)
  def test_any_text(self, text):
    self._read(text)
    self._read(_ptx(text))
    self._read(f"{_sass('NOP')}\n{text}")

  @hypothesis.given(st.data())
  @hypothesis.settings(deadline=None, max_examples=150)
  def test_damaged_kernels(self, data):
    text = _TEXTS[data.draw(st.sampled_from(sorted(_TEXTS)))]
    lines = text.split("\n")
    for _ in range(data.draw(st.integers(1, 4))):
      at = data.draw(st.integers(0, len(lines) - 1))
      column = data.draw(st.integers(0, len(lines[at])))
      what = data.draw(st.sampled_from(("delete", "swap", "insert", "cut")))
      if what == "delete" and len(lines) > 1:
        del lines[at]
      elif what == "swap":
        other = data.draw(st.integers(0, len(lines) - 1))
        lines[at], lines[other] = lines[other], lines[at]
      elif what == "insert":
        added = data.draw(
            st.text(st.sampled_from('{}();:,."/*@%$\\x0 \t\n\rr9é')) | st.text()
        )
        lines[at] = lines[at][:column] + added + lines[at][column:]
      elif what == "cut":
        lines = [*lines[:at], lines[at][:column]]
    self._read("\n".join(lines))



class BranchTableTest(absltest.TestCase):
  """Labels that only a table of branch targets refers to."""

  _TEXT = """
.version 8.0
.target sm_90a
.address_size 64
.visible .entry kernel()
{
  .reg .b32 %r<3>;
  mov.u32 %r1, %tid.x;
table: .branchtargets $L_1, $L_2;
  brx.idx %r1, table;
$L_1:
  add.s32 %r2, %r1, 1;
  ret;
$L_2:
  add.s32 %r2, %r1, 2;
  ret;
}
"""

  def test_names_do_not_matter(self):
    other = self._TEXT.replace("$L_", "$L_7").replace("table", "targets")
    assembly.assert_same_code(self._TEXT, other)

  def test_targets_do(self):
    swapped = self._TEXT.replace("$L_1, $L_2", "$L_2, $L_1")
    with self.assertRaises(AssertionError):
      assembly.assert_same_code(self._TEXT, swapped)


if __name__ == "__main__":
  absltest.main()
