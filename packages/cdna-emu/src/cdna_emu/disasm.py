"""Assembly text of a decoded instruction, in LLVM's syntax: what the assembler makes of it are the same bytes."""

import re
import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .decode import Operand, Record

NO_OPERAND, LITERAL, VGPR0, AGPR0 = 0xFFFF, 255, 256, 512
NEG, ABS = 1, 2
_NAMED = {
    102: "flat_scratch_lo",
    103: "flat_scratch_hi",
    104: "xnack_mask_lo",
    105: "xnack_mask_hi",
    106: "vcc_lo",
    107: "vcc_hi",
}
_NAMED |= {124: "m0", 126: "exec_lo", 127: "exec_hi", 251: "src_vccz", 252: "src_execz", 253: "src_scc"}
_NAMED |= {235: "src_shared_base", 236: "src_shared_limit", 237: "src_private_base", 238: "src_private_limit"}
_PAIRS = {102: "flat_scratch", 104: "xnack_mask", 106: "vcc", 126: "exec"}
_FLOATS = ("0.5", "-0.5", "1.0", "-1.0", "2.0", "-2.0", "4.0", "-4.0", "0.15915494")
_SDWA_SELECTS = ("BYTE_0", "BYTE_1", "BYTE_2", "BYTE_3", "WORD_0", "WORD_1", "DWORD")
_SDWA_UNUSED = ("UNUSED_PAD", "UNUSED_SEXT", "UNUSED_PRESERVE", "")
_DPP_ROWS = {0x100: "row_shl", 0x110: "row_shr", 0x120: "row_ror", 0x150: "row_newbcast"}
_DPP_WHOLE = {0x130: "wave_shl:1", 0x134: "wave_rol:1", 0x138: "wave_shr:1", 0x13C: "wave_ror:1", 0x140: "row_mirror"}
_DPP_WHOLE |= {0x141: "row_half_mirror", 0x142: "row_bcast:15", 0x143: "row_bcast:31"}
_FP8_SOURCE = re.compile("v_cvt_(pk_)?f32_(fp|bf)8")  # their SDWA form has no destination select
_SELECTS_A_BYTE = re.compile("v_cvt_(sr_|scalef32_pk_fp4_)")  # of the destination, by op_sel[3:2]
_ONLY_SHORT = frozenset(("v_fmamk_f32", "v_fmaak_f32", "v_madmk_f16", "v_madak_f16", "v_nop", "v_clrexcp"))
_ONLY_SHORT |= {"v_readfirstlane_b32", "v_swap_b32", "v_accvgpr_mov_b32"}
# Opcodes of VOP3 that have no shorter form carry no _e64.
_E64_ENCODINGS = ("VOP3", "VOP3_SDST", "VOP3SD")


def _range(letter: str, first: int, count: int) -> str:
    return f"{letter}{first}" if count == 1 else f"{letter}[{first}:{first + count - 1}]"


def register(code: int, count: int, literal: int = 0) -> str:
    """Name of an operand code: "v[0:1]", "vcc", "1.0", "0x1234"."""
    if code >= AGPR0:
        return _range("a", code - AGPR0, count)
    if code >= VGPR0:
        return _range("v", code - VGPR0, count)
    if count == 2 and code in _PAIRS:
        return _PAIRS[code]
    if code in _NAMED:
        return _NAMED[code]
    if code < 102:
        return _range("s", code, count)
    if 108 <= code < 124:
        return _range("ttmp", code - 108, count)
    if 128 <= code <= 208:
        return str(code - 128 if code <= 192 else 192 - code)
    if 240 <= code <= 248:
        return "0.15915494309189532" if code == 248 and count == 2 else _FLOATS[code - 240]
    if code == LITERAL:
        return f"{literal:#x}"
    return f"<operand {code}>"


def _source(operand: "Operand", literal: int, sext: bool = False) -> str:
    text = register(operand.code, operand.registers, literal)
    if sext:
        text = f"sext({text})"
    if operand.mods & ABS:
        text = f"|{text}|"
    if operand.mods & NEG:
        text = f"-{text}" if operand.code >= VGPR0 or operand.code < 128 or operand.mods & ABS else f"neg({text})"
    return text


def _bits(flags: int, shift: int, count: int) -> list[int]:
    return [flags >> shift + k & 1 for k in range(count)]


def _listed(name: str, bits: list[int]) -> str:
    return f" {name}:[{','.join(map(str, bits))}]"


def _output_modifiers(flags: int) -> str:
    return (" clamp" if flags & 1 else "") + ("", " mul:2", " mul:4", " div:2")[flags >> 1 & 3]


def _dpp(sub: int) -> str:
    control = sub & 0x1FF
    if control < 0x100:
        text = f" quad_perm:[{','.join(str(control >> 2 * k & 3) for k in range(4))}]"
    elif control in _DPP_WHOLE:
        text = f" {_DPP_WHOLE[control]}"
    else:
        text = f" {_DPP_ROWS.get(control & 0x1F0, '<dpp>')}:{control & 15}"
    return f"{text} row_mask:{sub >> 14 & 15:#x} bank_mask:{sub >> 10 & 15:#x}" + (
        " bound_ctrl:1" if sub >> 9 & 1 else ""
    )


def _sdwa(record: "Record", bare: bool, sources: int) -> str:
    sub = record.sub
    text = _output_modifiers(record.flags)
    if not bare:
        text += f" dst_sel:{_SDWA_SELECTS[sub >> 6 & 7]} dst_unused:{_SDWA_UNUSED[sub >> 9 & 3]}"
    text += f" src0_sel:{_SDWA_SELECTS[sub & 7]}"
    return text + (f" src1_sel:{_SDWA_SELECTS[sub >> 3 & 7]}" if sources > 1 else "")


def _cache(flags: int, name: str = "sc0") -> str:
    return (
        (f" {name}" if flags >> 15 & 1 else "")
        + (" nt" if flags >> 17 & 1 else "")
        + (" sc1" if flags >> 16 & 1 else "")
    )


def _waitcnt(simm: int) -> str:
    fields = (
        ("vmcnt", simm & 15 | simm >> 10 & 0x30, 63),
        ("expcnt", simm >> 4 & 7, 7),
        ("lgkmcnt", simm >> 8 & 15, 15),
    )
    return " ".join(f"{name}({value})" for name, value, top in fields if value != top) or f"{simm:#x}"


def _scalar_text(mnemonic: str, encoding: str, raw: bytes, r: "Record") -> str:
    simm = struct.unpack_from("<H", raw)[0]
    signed = simm - 0x10000 if simm & 0x8000 else simm
    operands = [register(o.code, o.registers, r.literal) for o in (r.dst, *r.src) if o.registers]
    if encoding.startswith("SOPK"):
        operands = operands[:1]
        hwreg = f"hwreg({simm & 63}, {simm >> 6 & 31}, {(simm >> 11) + 1})"
        if mnemonic == "s_getreg_b32":
            operands.append(hwreg)
        elif mnemonic.startswith("s_setreg"):
            operands.insert(0, hwreg)
            if encoding == "SOPK_LIT":
                operands.append(f"{r.literal:#x}")
        else:
            operands.append(str(simm if mnemonic.endswith("_u32") else signed))
    elif mnemonic == "s_set_gpr_idx_on":
        operands[1:] = [str(raw[1] & 15)]
    elif mnemonic == "s_waitcnt":
        operands = [_waitcnt(simm)]
    elif encoding == "SOPP" and (mnemonic in _SIMM_OPS or "branch" in mnemonic or simm):
        operands = [str(signed if "branch" in mnemonic else simm)]
    if "branch" in mnemonic or mnemonic == "s_call_b64":
        operands[-1] += f" ; to {r.address + r.size + 4 * signed:#x}"
    return f"{mnemonic} {', '.join(operands)}".rstrip()


_SIMM_OPS = frozenset(
    ("s_nop", "s_sleep", "s_setprio", "s_sendmsg", "s_sendmsghalt", "s_trap", "s_sethalt", "s_setkill")
)


def _smem_text(mnemonic: str, r: "Record") -> str:
    data = r.dst if r.dst.registers else r.src[1]
    operands = [register(o.code, o.registers) for o in (data, r.src[2]) if o.registers]
    tail = ""
    if r.src[2].registers:
        if r.src[3].registers:
            operands.append(register(r.src[3].code, 1))
            tail = f" offset:{r.offset:#x}" if r.offset else ""
        else:
            operands.append(f"{r.offset:#x}")
    return f"{mnemonic} {', '.join(operands)}".rstrip() + tail + (" glc" if r.flags >> 15 & 1 else "")


def _vector_sources(mnemonic: str, r: "Record") -> Iterator[str]:
    implicit = _implicit_sources(mnemonic)
    for k, operand in enumerate(r.src):
        if operand.registers and k not in implicit:
            yield _source(operand, r.literal, bool(r.flags >> 20 & 1 and k < 2 and r.sub >> 11 + k & 1))


def _implicit_sources(mnemonic: str) -> tuple[int, ...]:
    if mnemonic.startswith(("v_fmac", "v_mac_f16", "v_pk_fmac", "v_dot2c", "v_dot4c", "v_dot8c")):
        return (2,)
    if mnemonic.startswith(("v_swap", "v_permlane16_swap", "v_permlane32_swap")):
        return (1,)
    return (3,) if mnemonic.startswith(("v_div_fmas", "v_smfmac")) else ()


def _vop_text(mnemonic: str, encoding: str, r: "Record") -> str:
    operands = [register(r.dst.code, r.dst.registers)] if r.dst.registers else []
    if r.sdst.registers and not mnemonic.startswith("v_cmpx"):
        operands.append(register(r.sdst.code, r.sdst.registers))
    if mnemonic.startswith("v_bitop3"):
        return _bitop3_text(mnemonic, r, operands)
    operands += _vector_sources(mnemonic, r)
    if encoding in _E64_ENCODINGS:
        suffix, tail = "_e64" if _has_short_form(mnemonic) else "", ""
        if opsel := r.flags >> 3 & 15:
            count = 3 if _SELECTS_A_BYTE.match(mnemonic) else sum(1 for o in r.src[:3] if o.registers)
            tail += _listed("op_sel", [*_bits(opsel, 0, count), opsel >> 3])
        tail += _output_modifiers(r.flags)
    elif encoding.endswith("_DPP16"):
        suffix, tail = "_dpp", _dpp(r.sub)
    elif "SDWA" in encoding:
        suffix, tail = (
            "_sdwa",
            _sdwa(
                r,
                encoding.startswith("VOPC") or _FP8_SOURCE.match(mnemonic) is not None,
                2 if encoding[3] != "1" else 1,
            ),
        )
    else:
        suffix, tail = "_e32", ""
        if mnemonic in _ONLY_SHORT:
            suffix = ""
    return f"{mnemonic}{suffix} {', '.join(operands)}".rstrip() + tail


def _bitop3_text(mnemonic: str, r: "Record", operands: list[str]) -> str:
    """The truth table is in the bits of neg, abs and omod."""
    operands += [register(o.code, o.registers) for o in r.src[:3]]
    table = (r.flags >> 1 & 3) << 6
    for k, operand in enumerate(r.src[:3]):
        table |= (operand.mods & NEG) << k | (operand.mods & ABS) << 2 + k
    opsel = r.flags >> 3 & 15
    tail = _listed("op_sel", _bits(opsel, 0, 4)) if opsel else ""
    return f"{mnemonic} {', '.join(operands)} bitop3:{table:#x}{tail}"


def _has_short_form(mnemonic: str) -> bool:
    from .decode import short_forms

    return mnemonic in short_forms()


def _vop3p_text(mnemonic: str, r: "Record") -> str:
    sources = [o for o in r.src[:3] if o.registers]
    mix = mnemonic.startswith("v_fma_mix")
    plain = [o if mix else o._replace(mods=0) for o in sources]
    operands = [register(r.dst.code, r.dst.registers), *(_source(o, r.literal) for o in plain)]
    count = len(sources)
    tail = ""
    if any(opsel := _bits(r.flags, 3, count)):
        tail += _listed("op_sel", opsel)
    high = _bits(r.flags, 7, count)
    if high != [0 if mix else 1] * count:
        tail += _listed("op_sel_hi", high)
    if not mix:
        if any(low := [o.mods & NEG for o in sources]):
            tail += _listed("neg_lo", low)
        if any(neg_hi := _bits(r.flags, 10, count)):
            tail += _listed("neg_hi", neg_hi)
    return f"{mnemonic} {', '.join(operands)}{tail}" + _output_modifiers(r.flags)


def _mfma_text(mnemonic: str, encoding: str, r: "Record") -> str:
    operands = [
        register(r.dst.code, r.dst.registers),
        *(register(o.code, o.registers) for o in r.src[:3] if o.registers),
    ]
    cbsz, abid, blgp = r.flags >> 21 & 7, r.flags >> 24 & 15, r.flags >> 28 & 7
    tail = ""
    if encoding == "VOP3PX2":
        operands += [register(r.src[3].code, 1), register(r.sub, 1)]
        tail += _listed("op_sel", _bits(r.flags, 3, 2)) if r.flags >> 3 & 3 else ""
        tail += _listed("op_sel_hi", _bits(r.flags, 7, 2))
    if mnemonic.startswith("v_mfma_f64"):
        tail += _listed("neg", _bits(blgp, 0, 3)) if blgp else ""
        blgp = 0
    pairs = (("cbsz", cbsz), ("abid", 0 if encoding == "VOP3PX2" else abid), ("blgp", blgp))
    return f"{mnemonic} {', '.join(operands)}{tail}" + "".join(f" {name}:{value}" for name, value in pairs if value)


def _ds_text(mnemonic: str, r: "Record") -> str:
    operands = [register(o.code, o.registers) for o in (r.dst, *r.src[:3]) if o.registers]
    if any(part in mnemonic for part in ("read2", "write2", "wrxchg2")):
        tail = "".join(f" offset{k}:{v}" for k, v in enumerate((r.offset & 255, r.offset >> 8)) if v)
    else:
        tail = f" offset:{r.offset}" if r.offset else ""
    return f"{mnemonic} {', '.join(operands)}".rstrip() + tail + (" gds" if r.flags >> 31 else "")


def _address_text(mnemonic: str, encoding: str, r: "Record") -> str:
    address = register(r.src[0].code, r.src[0].registers) if r.src[0].registers else "off"
    data = [register(r.src[1].code, r.src[1].registers)] if r.src[1].registers else []
    operands = [register(r.dst.code, r.dst.registers)] if r.dst.registers else []
    operands += [address, *data]
    if encoding != "FLAT":
        operands.append(register(r.src[2].code, r.src[2].registers) if r.src[2].registers else "off")
    return f"{mnemonic} {', '.join(operands)}" + (f" offset:{r.offset}" if r.offset else "") + _cache(r.flags)


def _buffer_text(mnemonic: str, r: "Record") -> str:
    if not r.src[2].registers:
        return mnemonic + _cache(r.flags)
    data = r.src[1] if r.src[1].registers else r.dst
    operands = [register(data.code, data.registers)] if data.registers else []
    operands.append(register(r.src[0].code, r.src[0].registers) if r.src[0].registers else "off")
    operands += [register(r.src[2].code, 4), register(r.src[3].code, 1)]
    tail = (" idxen" if r.flags >> 14 & 1 else "") + (" offen" if r.flags >> 13 & 1 else "")
    tail += (f" offset:{r.offset}" if r.offset else "") + _cache(r.flags) + (" lds" if r.flags >> 18 & 1 else "")
    return f"{mnemonic} {', '.join(operands)}{tail}"


def text_of(mnemonic: str, encoding: str, raw: bytes, record: "Record") -> str:
    """Text of a record; `encoding` is the name of its format ("VOP2_DPP16"), "" if nothing was decoded."""
    if not encoding:
        words = " ".join(f"{word:#010x}" for (word,) in struct.iter_unpack("<I", raw))
        return f"<unknown: {words}>"
    if encoding.startswith("SOP"):
        return _scalar_text(mnemonic, encoding, raw, record)
    if encoding == "SMEM":
        return _smem_text(mnemonic, record)
    if encoding == "VOP3P":
        return _vop3p_text(mnemonic, record)
    if encoding in ("VOP3P_MFMA", "VOP3PX2"):
        if "mfma" in mnemonic:
            return _mfma_text(mnemonic, encoding, record)
        return _vop3p_text(mnemonic, record).split(" op_sel_hi")[0]
    if encoding == "DS":
        return _ds_text(mnemonic, record)
    if encoding in ("FLAT", "GLOBAL", "SCRATCH"):
        return _address_text(mnemonic, encoding, record)
    if encoding == "MUBUF":
        return _buffer_text(mnemonic, record)
    return _vop_text(mnemonic, encoding, record)
