"""Machine code to the records that the core executes (struct Insn in core/core.h).

The instruction tables are tinygrad's (pinned: its modules below are no public interface); only this file uses them.
What they lack for our two architectures is put right here: the prefix of a scaled MFMA is told by its own opcode alone,
0x7f is the "no scalar address" of gfx9, xf32 MFMA has operands, and abs of v_fma_mix is where neg_hi is.
"""

import functools
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from tinygrad.renderer.amd import detect_format
from tinygrad.renderer.amd.dsl import EnumBitField, FixedBitField
from tinygrad.runtime.autogen.amd.cdna import enum as tables
from tinygrad.runtime.autogen.amd.cdna.ins import VOP3P_MFMA, VOP3PX2
from tinygrad.runtime.autogen.amd.cdna.operands import OPERANDS

from . import ops
from .disasm import text_of

VCC, EXEC, LITERAL, VGPR0, AGPR0, NO_OPERAND = 106, 126, 255, 256, 512, 0xFFFF
NEG, ABS = 1, 2
CLAMP, OFFEN, IDXEN, SC0, SC1, NT, TO_LDS, DPP, SDWA = (
    1,
    1 << 13,
    1 << 14,
    1 << 15,
    1 << 16,
    1 << 17,
    1 << 18,
    1 << 19,
    1 << 20,
)
GDS = 1 << 31
OMOD, OPSEL, OPSEL_HI, NEG_HI, CBSZ, ABID, BLGP = 1, 3, 7, 10, 21, 24, 28  # shifts

_LAYOUT = struct.Struct("<IHBB" + "HBB" * 6 + "IiII")
RECORD_DTYPE = np.dtype(
    [
        ("address", "<u4"),
        ("op", "<u2"),
        ("size", "u1"),
        ("sources", "u1"),
        *((name, [("code", "<u2"), ("count", "u1"), ("mods", "u1")]) for name in ("dst", "sdst")),
        ("src", [("code", "<u2"), ("count", "u1"), ("mods", "u1")], (4,)),
        ("literal", "<u4"),
        ("offset", "<i4"),
        ("flags", "<u4"),
        ("sub", "<u4"),
    ]
)
assert RECORD_DTYPE.itemsize == _LAYOUT.size == 48

# LLVM's names, which the core uses, for what the ISA document calls otherwise.
_RENAMED = {
    "v_accvgpr_read": "v_accvgpr_read_b32",
    "v_accvgpr_write": "v_accvgpr_write_b32",
    "v_mad_mix_f32": "v_fma_mix_f32",
    "v_mad_mixlo_f16": "v_fma_mixlo_f16",
    "v_mad_mixhi_f16": "v_fma_mixhi_f16",
}
_XF32 = {
    "v_mfma_f32_16x16x8_xf32": {"vdst": 4, "src0": 2, "src1": 2, "src2": 4},
    "v_mfma_f32_32x32x4_xf32": {"vdst": 16, "src0": 2, "src1": 2, "src2": 16},
}
_CARRY_IN = frozenset(("v_addc_co_u32", "v_subb_co_u32", "v_subbrev_co_u32"))
_CARRY_OUT = _CARRY_IN | {"v_add_co_u32", "v_sub_co_u32", "v_subrev_co_u32"}
_READS_DST = frozenset(
    ("v_fmac_f32", "v_fmac_f64", "v_mac_f16", "v_pk_fmac_f16", "v_dot2c_f32_f16", "v_dot2c_f32_bf16", "v_dot2c_i32_i16")
) | {"v_dot4c_i32_i8", "v_dot8c_i32_i4"}
_SOPK_READS = frozenset(("s_addk_i32", "s_mulk_i32"))
BRANCHES = frozenset(("s_branch", "s_call_b64", "s_cbranch_i_fork")) | {
    f"s_cbranch_{condition}" for condition in ("scc0", "scc1", "vccz", "vccnz", "execz", "execnz")
}


class Operand(NamedTuple):
    """One operand: its code in core.h, the 32-bit registers it takes, NEG and ABS."""

    code: int = NO_OPERAND
    registers: int = 0
    mods: int = 0


_NONE = Operand()


class Record(NamedTuple):
    """The fields of struct Insn. Branches: `offset` is the index of the target, -1 if there is no instruction there."""

    address: int
    op: int
    size: int
    sources: int  # 1 + index of the last operand of src in use
    dst: Operand
    sdst: Operand
    src: tuple[Operand, Operand, Operand, Operand]
    literal: int
    offset: int
    flags: int
    sub: int

    def pack(self) -> bytes:
        operands = (*self.dst, *self.sdst, *self.src[0], *self.src[1], *self.src[2], *self.src[3])
        return _LAYOUT.pack(*self[:4], *operands, *self[7:])


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction. `address`: bytes from the start of the code's section; `mnemonic`: without encoding suffix."""

    address: int
    size: int
    mnemonic: str
    raw: bytes
    unit: str  # enum Unit of core.h; "" if the core does not know the opcode
    encoding: str
    record: Record

    @property
    def text(self) -> str:
        """As the assembler reads it."""
        return text_of(self.mnemonic, self.encoding, self.raw, self.record)


@dataclass(slots=True)
class _Draft:
    dst: Operand = _NONE
    sdst: Operand = _NONE
    src0: Operand = _NONE
    src1: Operand = _NONE
    src2: Operand = _NONE
    src3: Operand = _NONE
    literal: int = 0
    offset: int = 0
    flags: int = 0
    sub: int = 0


@dataclass(frozen=True, slots=True)
class _Form:
    """What encoding and opcode say of an instruction, from tinygrad's tables."""

    encoding: str
    mnemonic: str
    size: int
    shifts: Mapping[str, tuple[int, int]]  # field: lowest bit, mask
    counts: Mapping[str, int]  # operand field: 32-bit registers
    kinds: Mapping[str, str]  # operand field: OpType name

    def get(self, raw: int, field: str) -> int:
        place = self.shifts.get(field)
        return (raw >> place[0]) & place[1] if place else 0

    def vector(self, raw: int, field: str, acc: int = 0, mods: int = 0) -> Operand:
        """A vector register of an 8-bit field; _NONE if the opcode does not have the operand."""
        if field not in self.counts:
            return _NONE
        kind = self.kinds[field]
        number = self.get(raw, field)
        if "SREG" in kind or "SDST" in kind:
            return Operand(number, self.counts[field], mods)
        base = AGPR0 if acc or kind == "OPR_ACCVGPR" else VGPR0
        return Operand(base + (number & 0xFF), self.counts[field], mods)

    def source(self, raw: int, field: str, acc: int = 0, mods: int = 0) -> Operand:
        """A 9-bit or scalar 8-bit source."""
        if field not in self.counts:
            return _NONE
        code = self.get(raw, field)
        if code >= VGPR0 and (acc or self.kinds[field] == "OPR_SRC_ACCVGPR"):
            code += AGPR0 - VGPR0
        return Operand(code, self.counts[field], mods)


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


def _mods(neg: int, abs_: int, k: int) -> int:
    return (neg >> k & 1) * NEG | (abs_ >> k & 1) * ABS


def _scalar(form: _Form, raw: int) -> _Draft:
    d = _Draft(src0=form.source(raw, "ssrc0"), src1=form.source(raw, "ssrc1"), literal=form.get(raw, "literal"))
    if "sdst" in form.counts:
        d.dst = Operand(form.get(raw, "sdst"), form.counts["sdst"])
    return d


def _sopk(form: _Form, raw: int) -> _Draft:
    d = _Draft(offset=_signed(form.get(raw, "simm16"), 16), literal=form.get(raw, "literal"))
    if "sdst" in form.counts:
        register = Operand(form.get(raw, "sdst"), form.counts["sdst"])
        compares = form.mnemonic.startswith("s_cmpk") or form.mnemonic == "s_setreg_b32"
        if not compares:
            d.dst = register
        if compares or form.mnemonic in _SOPK_READS:
            d.src0 = register
    return d


def _sopp(form: _Form, raw: int) -> _Draft:
    return _Draft(offset=_signed(form.get(raw, "simm16"), 16))


def _smem(form: _Form, raw: int) -> _Draft:
    d = _Draft(flags=SC0 if form.get(raw, "glc") else 0)
    if "sbase" in form.counts:
        d.src2 = Operand(form.get(raw, "sbase") * 2, form.counts["sbase"])
        if form.get(raw, "imm"):
            d.offset = _signed(form.get(raw, "offset"), 21)
            if form.get(raw, "soffset_en"):
                d.src3 = Operand(form.get(raw, "soffset"), 1)
        elif form.get(raw, "soffset_en"):
            d.src3 = Operand(form.get(raw, "soffset"), 1)
        else:
            d.src3 = Operand(form.get(raw, "offset") & 0x7F, 1)
    if "sdata" in form.counts:
        data = Operand(form.get(raw, "sdata"), form.counts["sdata"])
        if "store" in form.mnemonic:
            d.src1 = data
        else:
            d.dst = data
    return d


def _implicit(form: _Form, d: _Draft) -> None:
    """Operands that the encoding does not spell: VCC of carries and selects, the accumulator of v_fmac."""
    name = form.mnemonic
    if form.encoding.startswith("VOPC"):
        d.dst = Operand(VCC, 2)
    if name.startswith("v_cmpx"):
        d.sdst = Operand(EXEC, 2)
    if form.encoding.startswith("VOP2"):
        if name == "v_cndmask_b32":
            d.src2 = Operand(VCC, 2)
        if name in _CARRY_OUT:
            d.sdst = Operand(VCC, 2)
        if name in _CARRY_IN:
            d.src3 = Operand(VCC, 2)
    if name in _READS_DST:
        d.src2 = d.dst
    elif name in ("v_swap_b32", "v_permlane16_swap_b32", "v_permlane32_swap_b32"):
        d.src1 = d.dst
    elif name.startswith("v_div_fmas"):
        d.src3 = Operand(VCC, 2)


def _vop12c(form: _Form, raw: int) -> _Draft:
    d = _Draft(dst=form.vector(raw, "vdst"), src0=form.source(raw, "src0"), src1=form.vector(raw, "vsrc1"))
    d.literal = form.get(raw, "literal")
    if form.mnemonic in ("v_fmamk_f32", "v_madmk_f16"):
        d.src1, d.src2 = Operand(LITERAL, 1), d.src1
    elif form.mnemonic in ("v_fmaak_f32", "v_madak_f16"):
        d.src2 = Operand(LITERAL, 1)
    _implicit(form, d)
    return d


def _pair_mods(form: _Form, raw: int, k: int) -> int:
    return form.get(raw, f"src{k}_neg") * NEG | form.get(raw, f"src{k}_abs") * ABS


def _dpp(form: _Form, raw: int) -> _Draft:
    d = _vop12c(form, raw)
    d.src0 = Operand(VGPR0 + form.get(raw, "vsrc0"), form.counts.get("src0", 1), _pair_mods(form, raw, 0))
    d.src1 = d.src1._replace(mods=_pair_mods(form, raw, 1)) if "vsrc1" in form.counts else d.src1
    d.flags = DPP
    d.sub = form.get(raw, "dpp") | form.get(raw, "bc") << 9 | form.get(raw, "bank_mask") << 10
    d.sub |= form.get(raw, "row_mask") << 14
    return d


def _sdwa(form: _Form, raw: int) -> _Draft:
    d = _vop12c(form, raw)
    base = 0 if form.get(raw, "s0") else VGPR0
    d.src0 = Operand(base + form.get(raw, "vsrc0"), form.counts.get("src0", 1), _pair_mods(form, raw, 0))
    if "vsrc1" in form.counts:
        base = 0 if form.get(raw, "s1") else VGPR0
        d.src1 = Operand(base + form.get(raw, "vsrc1"), form.counts["vsrc1"], _pair_mods(form, raw, 1))
    d.flags = SDWA | form.get(raw, "clmp") * CLAMP | form.get(raw, "omod") << OMOD
    dst_sel = form.get(raw, "dst_sel") if "dst_sel" in form.shifts else 6
    d.sub = form.get(raw, "src0_sel") | form.get(raw, "src1_sel") << 3 | dst_sel << 6
    d.sub |= form.get(raw, "dst_unused") << 9 | form.get(raw, "src0_sext") << 11 | form.get(raw, "src1_sext") << 12
    if form.encoding.startswith("VOPC") and form.get(raw, "sd"):
        d.dst = Operand(form.get(raw, "sdst"), 2)
    return d


def _vop3(form: _Form, raw: int) -> _Draft:
    neg, abs_, omod = form.get(raw, "neg"), form.get(raw, "abs"), form.get(raw, "omod")
    d = _Draft(dst=form.vector(raw, "vdst"))
    if "sdst" in form.counts:
        d.sdst = Operand(form.get(raw, "sdst"), form.counts["sdst"])
    d.src0 = form.source(raw, "src0", mods=_mods(neg, abs_, 0))
    d.src1 = form.source(raw, "src1", mods=_mods(neg, abs_, 1))
    d.src2 = form.source(raw, "src2", mods=_mods(neg, abs_, 2))
    if form.mnemonic in _CARRY_IN:
        d.src2, d.src3 = _NONE, d.src2
    d.flags = form.get(raw, "clmp") * CLAMP | omod << OMOD | form.get(raw, "opsel") << OPSEL
    _implicit(form, d)
    return d


def _vop3p(form: _Form, raw: int) -> _Draft:
    neg, neg_hi = form.get(raw, "neg"), form.get(raw, "neg_hi")
    abs_ = neg_hi if form.mnemonic.startswith("v_fma_mix") else 0
    d = _Draft(dst=form.vector(raw, "vdst"))
    d.src0 = form.source(raw, "src0", mods=_mods(neg, abs_, 0))
    d.src1 = form.source(raw, "src1", mods=_mods(neg, abs_, 1))
    d.src2 = form.source(raw, "src2", mods=_mods(neg, abs_, 2))
    opsel_hi = form.get(raw, "opsel_hi") | form.get(raw, "opsel_hi2") << 2
    d.flags = form.get(raw, "clmp") * CLAMP | form.get(raw, "opsel") << OPSEL | opsel_hi << OPSEL_HI | neg_hi << NEG_HI
    return d


_F8F6F4_REGISTERS = (8, 8, 6, 6, 4)  # by CBSZ or BLGP: fp8, bf8, fp6, bf6, fp4


def _mfma(form: _Form, raw: int) -> _Draft:
    acc, acc_cd = form.get(raw, "acc"), form.get(raw, "acc_cd")
    cbsz, blgp = form.get(raw, "cbsz"), form.get(raw, "blgp")
    d = _Draft(dst=form.vector(raw, "vdst", acc_cd))
    d.src0 = form.source(raw, "src0", acc & 1)
    d.src1 = form.source(raw, "src1", acc >> 1)
    d.src2 = form.source(raw, "src2", acc_cd if "smfmac" not in form.mnemonic else 0)
    if "f8f6f4" in form.mnemonic:
        if cbsz > 4 or blgp > 4:
            raise ValueError(f"{form.mnemonic}: cbsz {cbsz}, blgp {blgp}; expected 0 to 4")
        d.src0 = d.src0._replace(registers=_F8F6F4_REGISTERS[cbsz])
        d.src1 = d.src1._replace(registers=_F8F6F4_REGISTERS[blgp])
    if "smfmac" in form.mnemonic:
        d.src3 = d.dst  # accumulates in place; src2 holds the indices
    d.flags = cbsz << CBSZ | form.get(raw, "abid") << ABID | blgp << BLGP
    if form.encoding == "VOP3PX2":
        d.src3 = form.source(raw, "scale_src0")  # scale of A; that of B: its code in sub
        d.sub = form.get(raw, "scale_src1")
        d.flags |= form.get(raw, "opsel") << OPSEL | form.get(raw, "opsel_hi") << OPSEL_HI
    return d


def _ds(form: _Form, raw: int) -> _Draft:
    acc = form.get(raw, "acc")
    d = _Draft(dst=form.vector(raw, "vdst", acc), src0=form.vector(raw, "addr"))
    d.src1, d.src2 = form.vector(raw, "data0", acc), form.vector(raw, "data1", acc)
    d.offset = form.get(raw, "offset0") | form.get(raw, "offset1") << 8
    d.flags = GDS if form.get(raw, "gds") else 0
    return d


def _cache_bits(form: _Form, raw: int) -> int:
    return form.get(raw, "sc0") * SC0 | form.get(raw, "sc1") * SC1 | form.get(raw, "nt") * NT


def _flat(form: _Form, raw: int) -> _Draft:
    acc, saddr = form.get(raw, "acc"), form.get(raw, "saddr")
    d = _Draft(flags=_cache_bits(form, raw), src1=form.vector(raw, "data", acc), dst=form.vector(raw, "vdst", acc))
    bits = 12 if form.encoding == "FLAT" else 13
    d.offset = form.get(raw, "offset") if form.encoding == "FLAT" else _signed(form.get(raw, "offset"), bits)
    based = saddr != 0x7F and form.encoding != "FLAT"
    if based:
        d.src2 = Operand(saddr, 2 if form.encoding == "GLOBAL" else 1)
    if form.encoding == "SCRATCH":
        d.src0 = form.vector(raw, "addr")._replace(registers=1) if form.get(raw, "sve") else _NONE
    else:
        d.src0 = form.vector(raw, "addr")._replace(registers=1 if based else 2)
    if "_lds_" in form.mnemonic:
        d.flags |= TO_LDS
        d.dst = _NONE
    if "atomic" in form.mnemonic and not form.get(raw, "sc0"):
        d.dst = _NONE
    return d


def _mubuf(form: _Form, raw: int) -> _Draft:
    d = _Draft(flags=_cache_bits(form, raw), offset=form.get(raw, "offset"))
    if "srsrc" not in form.counts:
        return d
    offen, idxen, to_lds = form.get(raw, "offen"), form.get(raw, "idxen"), form.get(raw, "lds")
    d.flags |= offen * OFFEN | idxen * IDXEN | to_lds * TO_LDS
    if offen or idxen:
        d.src0 = form.vector(raw, "vaddr")._replace(registers=offen + idxen)
    d.src2 = Operand(form.get(raw, "srsrc") * 4, 4)
    d.src3 = Operand(form.get(raw, "soffset"), 1)
    data = form.vector(raw, "vdata", form.get(raw, "acc"))
    if "load" in form.mnemonic:
        d.dst = _NONE if to_lds else data
    else:
        d.src1 = data
        if "atomic" in form.mnemonic and form.get(raw, "sc0"):
            d.dst = data._replace(registers=data.registers // 2) if "cmpswap" in form.mnemonic else data
    return d


_FILL: dict[str, Callable[[_Form, int], _Draft]] = {
    **dict.fromkeys(("SOP1", "SOP2", "SOPC", "SOP1_LIT", "SOP2_LIT", "SOPC_LIT"), _scalar),
    **dict.fromkeys(("SOPK", "SOPK_LIT"), _sopk),
    "SOPP": _sopp,
    "SMEM": _smem,
    **dict.fromkeys(("VOP1", "VOP1_LIT", "VOP2", "VOP2_LIT", "VOPC", "VOPC_LIT"), _vop12c),
    **dict.fromkeys(("VOP1_DPP16", "VOP2_DPP16"), _dpp),
    **dict.fromkeys(("VOP1_SDWA", "VOP2_SDWA", "VOPC_SDWA_SDST"), _sdwa),
    **dict.fromkeys(("VOP3", "VOP3_SDST", "VOP3SD"), _vop3),
    "VOP3P": _vop3p,
    **dict.fromkeys(("VOP3P_MFMA", "VOP3PX2"), _mfma),
    "DS": _ds,
    **dict.fromkeys(("FLAT", "GLOBAL", "SCRATCH"), _flat),
    "MUBUF": _mubuf,
}


def _llvm_name(name: str) -> str:
    mnemonic = name.lower().removesuffix("_e32").removesuffix("_e64")
    return _RENAMED.get(mnemonic, mnemonic)


def _form(cls: Any, word: int) -> _Form:
    fields = dict(cls._fields)
    shifts = {name: (field.lo, field.mask) for name, field in fields.items() if not isinstance(field, FixedBitField)}
    enum = fields["op"]
    assert isinstance(enum, EnumBitField)
    op = enum.decode(word >> enum.lo & enum.mask)
    operands = OPERANDS.get(op, {})
    return _Form(
        cls.__name__,
        _llvm_name(op.name),
        cls._base_size,
        shifts,
        {name: max(1, bits // 32) for name, (_, bits, _) in operands.items()},
        {name: kind.name for name, (_, _, kind) in operands.items()},
    )


@functools.cache
def _form_of_bits(word: int) -> _Form:
    """Form of an instruction whose first dword has these format and opcode bits. ValueError: none."""
    code = word.to_bytes(4, "little") + bytes(12)
    cls = type(detect_format(code, "cdna").from_bytes(code))
    form = _form(cls, word)
    if form.mnemonic in _XF32:  # listed under VOP3P, without operands
        kinds = dict.fromkeys(_XF32[form.mnemonic], "OPR_SRC_VGPR_OR_ACCVGPR")
        return replace(_form(VOP3P_MFMA, word), counts=_XF32[form.mnemonic], kinds=kinds)
    return form


@functools.cache
def _scaled_mfma_form(word: int) -> _Form:
    return _form(VOP3PX2, word << 64)


def _format_bits(word: int) -> int:
    """The bits of a first dword that choose format, opcode and variant (DPP, SDWA, literal)."""
    if word >> 31 == 0:
        src0 = word & 0x1FF
        variant = src0 if src0 in (249, 250, 255) else 0
        top = word >> 25
        return word & (0xFE01FE00 if top == 0x3F else 0xFFFE0000 if top == 0x3E else 0xFE000000) | variant
    if word >> 30 == 2:
        top = word >> 23
        literal = LITERAL if word & 0xFF == LITERAL else 0
        if top == 0x17F:
            return word & 0xFFFF0000
        if top == 0x17D:
            return word & 0xFF80FF00 | literal
        if top >> 5 == 0xB and top != 0x17E:
            return word & 0xFF800000
        return word & (0xFFFF0000 if top == 0x17E else 0xFF800000) | (
            LITERAL if word >> 8 & 0xFF == LITERAL else literal
        )
    return word & {0x34: 0xFFFF0000, 0x36: 0xFFFE0000, 0x37: 0xFFFCC000}.get(word >> 26, 0xFFFC0000)


_RESERVED = frozenset((*range(209, 235), 239, 249, 250, 254))
_SCALE_PREFIX = 0xD3AC  # v_mfma_ld_scale_b32, the first half of a scaled MFMA


def _find_form(window: bytes) -> _Form:
    """ValueError: not an instruction of the tables."""
    word = int.from_bytes(window[:4], "little")
    if word >> 16 == _SCALE_PREFIX and len(window) == 16:
        form = _scaled_mfma_form(int.from_bytes(window[8:12], "little") & 0xFFFF0000)
    else:
        form = _form_of_bits(_format_bits(word))
    if form.encoding not in _FILL or len(window) < form.size:
        raise ValueError(f"{form.encoding} of {len(window)} bytes")
    return form


def _decode(form: _Form, raw: bytes, arch: str) -> Instruction:
    """At address 0. ValueError: reserved operands."""
    d = _FILL[form.encoding](form, int.from_bytes(raw, "little"))
    src = (d.src0, d.src1, d.src2, d.src3)
    if any(operand.code in _RESERVED for operand in src):
        raise ValueError("reserved source")
    op = ops.table().get(form.mnemonic)
    number = op.number if op is not None and op.on(arch) else ops.UNKNOWN
    sources = max((k + 1 for k, operand in enumerate(src) if operand.registers), default=0)
    record = Record(0, number, form.size, sources, d.dst, d.sdst, src, d.literal, d.offset, d.flags, d.sub)
    return Instruction(0, form.size, form.mnemonic, raw, op.unit if op else "", form.encoding, record)


def _unknown(raw: bytes) -> Instruction:
    record = Record(0, ops.UNKNOWN, len(raw), 0, _NONE, _NONE, (_NONE,) * 4, 0, 0, 0, 0)
    return Instruction(0, len(raw), "<unknown>", raw, "", "", record)


def _with_targets(instructions: list[Instruction]) -> list[Instruction]:
    """Branch offsets, in dwords from the next instruction, become indices of instructions."""
    index = {instruction.address: k for k, instruction in enumerate(instructions)}
    for k, i in enumerate(instructions):
        if i.mnemonic in BRANCHES:
            target = index.get(i.address + i.size + 4 * i.record.offset, -1)
            instructions[k] = replace(i, record=i.record._replace(offset=target))
    return instructions


def decode_text(code: bytes, *, arch: str, base: int = 0) -> list[Instruction]:
    """Every instruction of `code`, whose first byte has the address `base`.

    What is not in the tables, or not on `arch`, gets `record.op == ops.UNKNOWN`: it is an error only when executed.
    ValueError: `arch` is neither "gfx942" nor "gfx950", or `code` is not whole dwords.
    """
    if arch not in ops.ARCHS:
        raise ValueError(f"arch: got {arch!r}, expected one of {', '.join(ops.ARCHS)}")
    if len(code) % 4:
        raise ValueError(f"code: got {len(code)} bytes, expected a multiple of 4")
    found: list[Instruction] = []
    seen: dict[bytes, Instruction] = {}
    position = 0
    while position < len(code):
        raw = window = code[position : position + 16]
        try:
            form = _find_form(window)
            raw = window[: form.size]
            decoded = seen.get(raw) or _decode(form, raw, arch)
        except ValueError:
            raw = window[:4] if raw is window else raw
            decoded = _unknown(raw)
        seen[raw] = decoded
        address = base + position
        record = decoded.record._replace(address=address)
        found.append(Instruction(address, len(raw), decoded.mnemonic, raw, decoded.unit, decoded.encoding, record))
        position += len(raw)
    return _with_targets(found)


def records(instructions: Sequence[Instruction]) -> npt.NDArray[np.void]:
    """One element of RECORD_DTYPE (struct Insn) per instruction."""
    return np.frombuffer(b"".join(i.record.pack() for i in instructions), RECORD_DTYPE).copy()


def _names(*enums: str) -> frozenset[str]:
    classes = [cls for name, cls in vars(tables).items() if name.endswith("Op") and (not enums or name in enums)]
    return frozenset(_llvm_name(name) for cls in classes for name in cls.__members__)


@functools.cache
def short_forms() -> frozenset[str]:
    """Mnemonics with a 32-bit vector encoding: LLVM marks the 64-bit one of these with _e64."""
    return _names("VOP1Op", "VOP2Op", "VOPCOp")


@functools.cache
def mnemonics() -> frozenset[str]:
    """Every mnemonic of the tables, without encoding suffix, whatever its architecture."""
    return _names()
