"""The decoder against LLVM: its assembler makes the same bytes of our text; a compiler's text has the same lines."""

from __future__ import annotations

import importlib.metadata
import re
from fnmatch import fnmatch
from pathlib import Path

import pytest
from asm import assemble
from kernels.compiled import ARCHS, Compiled
from kernels.triton_cases import CASES, SKIP

from cdna_emu import ops
from cdna_emu.codeobject import CodeObject
from cdna_emu.decode import RECORD_DTYPE, Instruction, decode_text, mnemonics, records

BOTH = """
s_mov_b32 s3, 0x12345678
s_mov_b64 exec, -1
s_add_u32 s3, s4, 0x12345678
s_and_b64 vcc, exec, s[4:5]
s_cmp_lg_u64 s[2:3], 0
s_bitcmp1_b32 s2, 31
s_movk_i32 s3, -5
s_addk_i32 s3, -5
s_cmpk_eq_u32 s3, 65280
s_getreg_b32 s0, hwreg(1, 4, 4)
s_setreg_b32 hwreg(1, 0, 8), s2
s_setreg_imm32_b32 hwreg(1, 4, 4), 0xff
s_waitcnt vmcnt(17) lgkmcnt(3)
s_waitcnt vmcnt(0) expcnt(0) lgkmcnt(0)
s_nop 3
s_barrier
s_setprio 1
s_sleep 2
s_endpgm
s_getpc_b64 s[4:5]
s_setpc_b64 s[4:5]
s_and_saveexec_b64 s[4:5], vcc
s_memtime s[2:3]
s_dcache_inv
s_load_dword s0, s[2:3], 0x1ffff
s_load_dwordx4 s[4:7], s[2:3], -0x10
s_load_dwordx8 s[8:15], s[2:3], s9
s_load_dwordx16 s[16:31], s[2:3], s9 offset:0x20
s_buffer_load_dwordx2 s[0:1], s[4:7], s9 glc
v_mov_b32_e32 v1, 0x3f8ccccd
v_mov_b64_e32 v[0:1], 1.0
v_mul_f32_e32 v0, 0.15915494, v1
v_mul_f64 v[0:1], v[2:3], 0.15915494309189532
v_add_f32_e64 v1, |s3|, -v2 clamp mul:2
v_fma_f64 v[0:1], -v[2:3], |v[4:5]|, 1.0
v_readfirstlane_b32 s1, v2
v_readlane_b32 s1, v2, s3
v_writelane_b32 v1, s2, m0
v_swap_b32 v1, v2
v_fmac_f32_e32 v1, s2, v3
v_fmamk_f32 v0, v1, 0x40490fdb, v2
v_fmaak_f32 v0, v1, v2, 0x40490fdb
v_cndmask_b32_e32 v1, 1.0, v3, vcc
v_cndmask_b32_e64 v1, v2, -v3, s[4:5]
v_add_co_u32_e32 v1, vcc, v2, v3
v_addc_co_u32_e32 v1, vcc, v2, v3, vcc
v_addc_co_u32_e64 v1, s[2:3], v4, v5, s[6:7]
v_mad_u64_u32 v[0:1], vcc, s4, v5, v[6:7]
v_div_scale_f32 v1, vcc, v2, v3, v2
v_div_fmas_f32 v1, v2, v3, v4
v_cmp_eq_u32_e32 vcc, s1, v2
v_cmp_gt_f32_e64 s[0:1], |v1|, neg(1.0)
v_cmp_class_f64_e64 vcc, v[2:3], v4
v_cmpx_lt_f32_e32 vcc, v0, v1
v_cmpx_lt_f32_e64 s[0:1], v0, v1
v_lshlrev_b64 v[0:1], s2, v[4:5]
v_lshl_add_u64 v[0:1], v[2:3], 3, v[4:5]
v_cvt_pk_fp8_f32 v1, v2, v3 op_sel:[0,0,1]
v_cvt_sr_fp8_f32 v1, v2, v3 op_sel:[0,0,1,1]
v_mad_legacy_f16 v1, v2, v3, v4
v_fma_f16 v1, v2, v3, v4 op_sel:[1,0,1,1]
v_mov_b32_dpp v1, v2 quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf
v_mov_b32_dpp v1, v2 row_newbcast:3 row_mask:0xf bank_mask:0xf
v_mov_b64_dpp v[0:1], v[2:3] row_newbcast:1 row_mask:0xf bank_mask:0xf
v_add_f32_dpp v1, -v2, |v3| row_bcast:15 row_mask:0xa bank_mask:0xf bound_ctrl:1
v_cndmask_b32_dpp v1, v2, v3, vcc row_shr:4 row_mask:0xf bank_mask:0x3
v_fmac_f32_dpp v0, v1, v2 row_half_mirror row_mask:0xf bank_mask:0xf
v_add_f32_sdwa v1, -|v2|, s3 clamp mul:2 dst_sel:WORD_1 dst_unused:UNUSED_PRESERVE src0_sel:DWORD src1_sel:WORD_0
v_lshlrev_b32_sdwa v1, v2, sext(v3) dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:BYTE_3 src1_sel:WORD_1
v_cvt_f32_fp8_sdwa v1, v2 src0_sel:BYTE_3
v_addc_co_u32_sdwa v1, vcc, v2, v3, vcc dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:BYTE_0 src1_sel:DWORD
v_cmp_eq_u32_sdwa s[2:3], v1, sext(v2) src0_sel:BYTE_0 src1_sel:WORD_1
v_pk_fma_f16 v0, v1, 1.0, v2
v_pk_fma_f32 v[0:1], v[2:3], s[4:5], v[6:7] op_sel:[0,1,0] op_sel_hi:[0,1,1] neg_lo:[1,0,0]
v_pk_add_f32 v[0:1], v[2:3], v[4:5] neg_hi:[0,1]
v_fma_mix_f32 v1, |v2|, -v3, v4 op_sel:[1,0,0] op_sel_hi:[1,0,0] clamp
v_dot2_f32_f16 v0, v1, v2, v3 neg_lo:[1,0,0] clamp
v_accvgpr_write_b32 a0, 1.0
v_accvgpr_read_b32 v0, a3
v_accvgpr_mov_b32 a0, a3
v_mfma_f32_16x16x16_bf16 a[0:3], v[2:3], a[4:5], a[0:3] cbsz:1 abid:2 blgp:3
v_mfma_f32_32x32x8_f16 v[0:15], v[16:17], v[18:19], 1.0
v_mfma_f64_16x16x4_f64 v[0:7], v[8:9], v[10:11], v[0:7] neg:[1,0,1]
v_mfma_i32_16x16x32_i8 v[0:3], v[4:5], v[6:7], v[0:3]
v_smfmac_f32_16x16x32_bf16 v[0:3], v[4:5], v[6:9], v10 cbsz:1 abid:1
ds_read_b32 v1, v2 offset:65535
ds_read_b96 v[2:4], v6
ds_read_b128 a[0:3], v6 offset:16
ds_read2_b32 v[0:1], v2 offset1:1
ds_read2st64_b64 v[0:3], v4 offset0:1 offset1:255
ds_write2_b32 v0, v1, v2 offset1:1
ds_write_b16_d16_hi v0, v1
ds_add_rtn_u32 v0, v1, v2
ds_cmpst_rtn_b32 v0, v1, v2, v3
ds_swizzle_b32 v0, v1 offset:32768
ds_bpermute_b32 v0, v1, v2
ds_append v0 offset:4
flat_load_dword v1, v[2:3] offset:4095
flat_atomic_add v0, v[2:3], v4 sc0
global_load_dword v1, v[2:3], off offset:-4096
global_load_dwordx3 v[2:4], v6, s[4:5] offset:4095 sc0 nt sc1
global_store_dwordx4 v[2:3], a[4:7], off
global_store_short_d16_hi v2, v3, s[4:5]
global_atomic_add_f32 v2, v3, s[4:5]
global_atomic_cmpswap v0, v[2:3], v[4:5], off sc0
global_load_lds_dword v2, s[2:3] offset:16
scratch_load_dword v1, v2, off offset:-4
scratch_load_dword v1, off, s3
scratch_store_dwordx2 off, v[2:3], off
buffer_load_dwordx4 v[0:3], v4, s[4:7], 0 offen offset:4095 sc0 nt sc1
buffer_load_ushort v0, off, s[4:7], s3
buffer_store_short a1, v[2:3], s[4:7], s3 idxen offen
buffer_load_dword v1, s[4:7], 0 offen offset:16 lds
buffer_load_dword off, s[4:7], s3 lds
buffer_atomic_cmpswap v[0:1], v2, s[4:7], 0 offen sc0
buffer_wbl2 sc1
buffer_inv sc0 sc1
"""
GFX942 = """
v_mfma_f32_16x16x8_xf32 a[0:3], v[2:3], v[4:5], a[0:3]
v_mfma_f32_32x32x4_xf32 v[0:15], v[2:3], a[4:5], 1.0
"""
GFX950 = """
v_bitop3_b32 v1, v2, s3, v4 bitop3:0xc6
v_bitop3_b16 v1, v2, v3, v4 bitop3:0x5a op_sel:[1,0,0,1]
v_cvt_pk_bf16_f32 v0, v1, v2
v_permlane16_swap_b32_e32 v0, v1
v_maximum3_f32 v0, v1, v2, v3
v_cvt_scalef32_pk_fp8_f32 v1, v2, v3, v4 op_sel:[0,0,0,1]
v_mfma_f32_16x16x32_bf16 v[0:3], v[4:7], v[8:11], 0
v_mfma_f32_16x16x128_f8f6f4 v[0:3], v[4:11], v[12:15], v[0:3] blgp:4
v_mfma_scale_f32_16x16x128_f8f6f4 v[0:3], v[4:11], v[12:17], v[0:3], v20, v21 op_sel:[1,0] op_sel_hi:[0,1] cbsz:1 blgp:2
ds_read_b64_tr_b16 v[0:1], v2 offset:16
ds_read_b96_tr_b6 v[0:2], v4
global_load_lds_dwordx4 v[2:3], off offset:16
buffer_load_dwordx4 v1, s[4:7], 0 offen lds
"""
# A line for each opcode that LLVM knows on one of the architectures.
OPCODES = Path(__file__).with_name("data").joinpath("opcodes.txt").read_text(encoding="utf-8").splitlines()
LINES = [
    pytest.param(line, arch, id=f"{arch}-{line}")
    for arch, text in (("gfx942", BOTH + GFX942), ("gfx950", BOTH + GFX950))
    for line in text.strip().splitlines()
    if line
]
COMPILED = [
    pytest.param(name, arch, id=f"{name}-{arch}") for arch in ARCHS for name in CASES if (name, arch) not in SKIP
]


def one(line: str, arch: str = "gfx950") -> Instruction:
    (instruction,) = decode_text(assemble(line, arch), arch=arch)
    return instruction


@pytest.mark.parametrize(("line", "arch"), LINES)
def test_text_is_what_was_assembled(line: str, arch: str) -> None:
    instruction = one(line, arch)
    assert instruction.text == line
    assert instruction.record.size == instruction.size == len(instruction.raw)


def mnemonics_of(assembly: str) -> list[str]:
    """Of the code of a compiler's .s file with one function."""
    body = re.split(r"^\s*\.(?:section|end_amdhsa_kernel)\b", assembly, maxsplit=1, flags=re.MULTILINE)[0]
    return re.findall(r"^\t([a-z]\w*)", body, re.MULTILINE)


def texts_that_assemble(compiled: Compiled) -> list[str]:
    kernel = CodeObject.parse(compiled.elf).kernel()
    texts = [instruction.text for instruction in kernel.instructions]
    assert assemble("\n".join(texts), compiled.arch) == kernel.code
    return texts


@pytest.mark.parametrize(("name", "arch"), COMPILED)
def test_code_of_triton(name: str, arch: str) -> None:
    """The decoded text gives the same bytes, and has the mnemonics of the compiler's text in the same order."""
    compiled = CASES[name](arch).compiled
    names = iter([text.split()[0] for text in texts_that_assemble(compiled)])
    for expected in mnemonics_of(compiled.assembly):
        # alignment of loops and functions is s_nop in the code, a directive in the text
        found = next(name for name in names if name == expected or name != "s_nop")
        assert found == expected
    assert set(names) <= {"s_nop"}


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_code_of_flydsl(arch: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    pytest.importorskip("flydsl")
    from kernels.flydsl_compile import compile_probes

    for compiled in compile_probes(arch, tmp_path_factory.mktemp(arch)).values():
        texts_that_assemble(compiled)


NONE = (0xFFFF, 0, 0)
VCC, EXEC = (106, 2, 0), (126, 2, 0)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("s_cmpk_lg_i32 s3, -5", {"dst": NONE, "src": [(3, 1, 0)], "offset": -5}),
        ("s_addk_i32 s3, -5", {"dst": (3, 1, 0), "src": [(3, 1, 0)]}),
        ("s_mov_b64 exec, vcc", {"dst": EXEC, "src": [VCC]}),
        ("s_add_u32 s1, 0x12345, 64", {"src": [(255, 1, 0), (192, 1, 0)], "literal": 0x12345}),
        ("s_load_dwordx8 s[8:15], s[2:3], 0x40", {"dst": (8, 8, 0), "src": [NONE, NONE, (2, 2, 0)], "offset": 0x40}),
        ("s_buffer_load_dword s1, s[4:7], s9", {"src": [NONE, NONE, (4, 4, 0), (9, 1, 0)]}),
        ("v_cmp_eq_u64_e32 vcc, v[2:3], v[4:5]", {"dst": VCC, "src": [(258, 2, 0), (260, 2, 0)]}),
        ("v_cmpx_lt_f32_e64 s[0:1], -v2, |v3|", {"dst": (0, 2, 0), "sdst": EXEC, "src": [(258, 1, 1), (259, 1, 2)]}),
        ("v_cndmask_b32_e32 v1, v2, v3, vcc", {"src": [(258, 1, 0), (259, 1, 0), VCC]}),
        ("v_addc_co_u32_e32 v1, vcc, v2, v3, vcc", {"sdst": VCC, "src": [(258, 1, 0), (259, 1, 0), NONE, VCC]}),
        (
            "v_subb_co_u32_e64 v1, s[2:3], v4, v5, s[6:7]",
            {"sdst": (2, 2, 0), "src": [(260, 1, 0), (261, 1, 0), NONE, (6, 2, 0)]},
        ),
        ("v_div_fmas_f64 v[0:1], v[2:3], v[4:5], v[6:7]", {"src": [(258, 2, 0), (260, 2, 0), (262, 2, 0), VCC]}),
        ("v_fmac_f32_e32 v1, s2, v3", {"dst": (257, 1, 0), "src": [(2, 1, 0), (259, 1, 0), (257, 1, 0)]}),
        ("v_fmamk_f32 v0, v1, 0x40490fdb, v2", {"src": [(257, 1, 0), (255, 1, 0), (258, 1, 0)], "literal": 0x40490FDB}),
        ("v_readlane_b32 s1, v2, 3", {"dst": (1, 1, 0), "src": [(258, 1, 0), (131, 1, 0)]}),
        ("v_mad_i64_i32 v[0:1], s[2:3], v4, s5, v[6:7]", {"dst": (256, 2, 0), "sdst": (2, 2, 0)}),
        ("v_mul_f32_e64 v1, v2, v3 clamp div:2", {"flags": 1 | 3 << 1}),
        ("v_add_f16_sdwa v1, s2, v3 dst_sel:WORD_1 dst_unused:UNUSED_PRESERVE src0_sel:BYTE_2 src1_sel:WORD_0",
         {"flags": 1 << 20, "sub": 2 | 4 << 3 | 5 << 6 | 2 << 9, "src": [(2, 1, 0), (259, 1, 0)]}),
        ("v_mov_b32_dpp v1, v2 row_shr:3 row_mask:0xa bank_mask:0x5 bound_ctrl:1",
         {"flags": 1 << 19, "sub": 0x113 | 1 << 9 | 5 << 10 | 10 << 14}),
        ("v_pk_fma_f16 v0, v1, v2, v3 op_sel:[1,0,1] op_sel_hi:[0,1,1] neg_lo:[1,0,0] neg_hi:[0,1,0]",
         {"flags": 5 << 3 | 6 << 7 | 2 << 10, "src": [(257, 1, 1), (258, 1, 0), (259, 1, 0)]}),
        ("v_mfma_f32_32x32x8_f16 a[0:15], a[2:3], v[4:5], a[16:31] cbsz:2 abid:1 blgp:5",
         {"dst": (512, 16, 0), "src": [(514, 2, 0), (260, 2, 0), (528, 16, 0)], "flags": 2 << 21 | 1 << 24 | 5 << 28}),
        ("v_mfma_f32_16x16x128_f8f6f4 v[0:3], v[4:9], v[12:15], 0 cbsz:2 blgp:4",
         {"src": [(260, 6, 0), (268, 4, 0), (128, 4, 0)]}),
        ("v_mfma_scale_f32_16x16x128_f8f6f4 v[0:3], v[4:11], v[12:19], v[0:3], v20, v21 op_sel_hi:[0,0]",
         {"src": [(260, 8, 0), (268, 8, 0), (256, 4, 0), (276, 1, 0)], "sub": 277}),
        ("ds_write2st64_b64 v0, v[2:3], v[4:5] offset0:3 offset1:5",
         {"dst": NONE, "src": [(256, 1, 0), (258, 2, 0), (260, 2, 0)], "offset": 3 | 5 << 8}),
        ("ds_read_b96 a[0:2], v6 offset:65535", {"dst": (512, 3, 0), "offset": 65535}),
        ("global_load_dwordx3 v[2:4], v6, s[4:5]", {"dst": (258, 3, 0), "src": [(262, 1, 0), NONE, (4, 2, 0)]}),
        ("global_store_dwordx2 v[6:7], v[2:3], off sc1", {"dst": NONE, "src": [(262, 2, 0), (258, 2, 0)]}),
        ("global_load_dword v0, v[2:3], off offset:-8 sc1", {"offset": -8, "flags": 1 << 16}),
        ("global_atomic_add v[2:3], v4, off", {"dst": NONE, "src": [(258, 2, 0), (260, 1, 0)]}),
        ("global_atomic_add_x2 v[0:1], v[2:3], v[4:5], off sc0", {"dst": (256, 2, 0), "flags": 1 << 15}),
        ("global_load_lds_dwordx4 v[2:3], off", {"dst": NONE, "src": [(258, 2, 0)], "flags": 1 << 18}),
        ("buffer_load_dwordx3 v[0:2], v[4:5], s[8:11], s3 idxen offen offset:7 nt",
         {"dst": (256, 3, 0), "src": [(260, 2, 0), NONE, (8, 4, 0), (3, 1, 0)], "offset": 7,
          "flags": 1 << 13 | 1 << 14 | 1 << 17}),
        ("buffer_store_dword a1, off, s[8:11], 0", {"dst": NONE, "src": [NONE, (513, 1, 0), (8, 4, 0), (128, 1, 0)]}),
        ("buffer_load_dword v1, s[4:7], 0 offen lds", {"dst": NONE, "flags": 1 << 13 | 1 << 18}),
        ("buffer_atomic_cmpswap v[0:1], v2, s[4:7], 0 offen sc0",
         {"dst": (256, 1, 0), "src": [(258, 1, 0), (256, 2, 0)]}),
    ],
)  # fmt: skip
def test_record(line: str, expected: dict[str, object]) -> None:
    """Operands as (code, registers, modifiers); sources that are not listed are not compared."""
    record = one(line).record
    for name, value in expected.items():
        found = getattr(record, name)
        assert (list(found[: len(value)]) if isinstance(value, list) else found) == value, name


def test_branches_hold_the_index_of_their_target() -> None:
    text = "s_nop 0\ns_cbranch_scc1 1\ns_mov_b32 s0, 0x12345\ns_branch -5\ns_branch 100\ns_endpgm"
    instructions = decode_text(assemble(text, "gfx942"), arch="gfx942", base=0x100)
    # the first goes into the middle of the 8-byte s_mov_b32
    assert [i.record.offset for i in instructions] == [0, -1, 0, 0, -1, 0]
    assert instructions[3].text == "s_branch -5 ; to 0x100"
    assert [i.address for i in instructions] == [0x100, 0x104, 0x108, 0x110, 0x114, 0x118]


def test_records_have_the_layout_of_the_core() -> None:
    instructions = decode_text(assemble("v_add_f32_e32 v1, 0x3f8ccccd, v3\ns_endpgm", "gfx942"), arch="gfx942", base=64)
    array = records(instructions)
    assert array.dtype == RECORD_DTYPE and array.itemsize == 48
    assert array["address"].tolist() == [64, 72] and array["size"].tolist() == [8, 4]
    assert array["op"].tolist() == [ops.table()["v_add_f32"].number, ops.table()["s_endpgm"].number]
    assert array["src"]["code"][0].tolist() == [255, 259, 0xFFFF, 0xFFFF]
    assert array["literal"][0] == 0x3F8CCCCD and array["sources"].tolist() == [2, 0]


@pytest.mark.parametrize(
    ("line", "home", "foreign"),
    [
        ("v_permlane16_swap_b32_e32 v0, v1", "gfx950", "gfx942"),
        ("ds_read_b64_tr_b16 v[0:1], v2", "gfx950", "gfx942"),
        ("v_mfma_f32_16x16x8_xf32 v[0:3], v[4:5], v[6:7], 0", "gfx942", "gfx950"),
    ],
)
def test_an_opcode_of_the_other_architecture_is_unknown(line: str, home: str, foreign: str) -> None:
    code = assemble(line, home)
    assert decode_text(code, arch=home)[0].record.op == ops.table()[line.split()[0].removesuffix("_e32")].number
    (instruction,) = decode_text(code, arch=foreign)
    assert instruction.record.op == ops.UNKNOWN and instruction.text == line


def test_words_that_are_no_instruction() -> None:
    code = bytes.fromhex("0000fce7") + assemble("s_endpgm", "gfx942") + bytes.fromhex("f2027e7e")
    unknown, end, last = decode_text(code, arch="gfx942")
    assert unknown.text == "<unknown: 0xe7fc0000>" and unknown.record.op == ops.UNKNOWN and unknown.size == 4
    assert end.text == "s_endpgm" and last.size == 4
    with pytest.raises(ValueError, match="multiple of 4"):
        decode_text(code[:-1], arch="gfx942")
    with pytest.raises(ValueError, match=r"arch: got 'gfx90a', expected one of gfx942, gfx950"):
        decode_text(code, arch="gfx90a")


def test_an_instruction_cut_off_at_the_end_is_unknown() -> None:
    (instruction,) = decode_text(assemble("v_fma_f32 v0, v1, v2, v3", "gfx942")[:4], arch="gfx942")
    assert instruction.record.op == ops.UNKNOWN


def test_an_8_byte_instruction_before_a_scalable_mfma_is_not_its_scale() -> None:
    lines = ["v_add_f32_e64 v1, v2, v3", "v_mfma_f32_16x16x128_f8f6f4 v[0:3], v[4:11], v[12:19], v[0:3]"]
    assert [i.text for i in decode_text(assemble("\n".join(lines), "gfx950"), arch="gfx950")] == lines


def accepted(line: str, arch: str) -> bool:
    try:
        return bool(assemble(line, arch))
    except ValueError:
        return False


@pytest.mark.parametrize("arch", ARCHS)
def test_one_line_of_every_opcode(arch: str) -> None:
    """The assembler decides what an architecture has: ops.def says the same. The text of all of them is as it was."""
    lines = [line for line in OPCODES if accepted(line, arch)]
    instructions = decode_text(assemble("\n".join(lines), arch), arch=arch)
    assert [i.text.split(" ; ")[0] for i in instructions] == lines
    assert {i.mnemonic for i in instructions} & ops.table().keys() == {
        op.name for op in ops.table().values() if op.on(arch)
    }


def test_every_opcode_of_the_core_has_a_mnemonic_of_the_tables() -> None:
    assert set(ops.table()) <= mnemonics()
    assert [op.number for op in ops.table().values()] == list(range(len(ops.table())))


def test_the_readme_lists_the_instructions_that_are_missing() -> None:
    readme = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    count, listed = re.findall(r"Of the ([\d,]+) mnemonics of .* these are missing:\n(.*?);", readme, re.DOTALL)[0]
    patterns = re.findall(r"`([^`]+)`", listed)
    missing = mnemonics() - ops.table().keys()
    assert count == f"{len(mnemonics()):,}"
    assert {name for name in mnemonics() if any(fnmatch(name, pattern) for pattern in patterns)} == missing
    assert [pattern for pattern in patterns if not any(fnmatch(name, pattern) for name in missing)] == []


def test_the_tables_are_those_this_was_written_for() -> None:
    """tinygrad's modules are not a public interface: another version needs a look at decode.py, then at this line."""
    assert importlib.metadata.version("tinygrad") == "0.14.0"
