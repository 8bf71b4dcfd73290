"""K5: the serial scan over chunks that carries the state S [V, K] of every (sequence, value head).

The state stays transposed against the usual formulation, [BV value rows, 128 keys], as the accumulator of both
products: S w^T and (gated v_new)^T k. Each product takes its state-side operand from registers (an fp32 accumulator
rounded to 16 bits keeps its lane layout), so nothing but w, k and u passes through shared memory on the serial chain.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from .common import CHUNK, HEAD_DIM, LOG2E, TRITON_DTYPE, CompileJob, dot, dot_add, exp2_gate, narrow, row_strides

if TYPE_CHECKING:
    from torch import Tensor

    from ...plan import ChunkPlan
    from ...spec import StateScanSpec


@triton.jit(
    do_not_specialize=["T", "num_slots", "stride_kb", "stride_kt", "stride_kh", "stride_in", "stride_out"],
    # Read by the element and often slices, whose alignment depends on the decode sequences or tokens before them.
    do_not_specialize_on_alignment=["g", "state_indices", "has_initial_state"],
)
def state_scan_kernel(
    k,
    w,
    u,
    g,
    gk,
    h,
    v_new,
    initial_state,
    final_state,
    state_indices,
    has_initial_state,
    cu_seqlens,
    chunk_offsets,
    T: tl.int32,
    num_slots: tl.int64,
    stride_kb: tl.int64,
    stride_kt: tl.int32,
    stride_kh: tl.int64,
    stride_in: tl.int64,
    stride_out: tl.int64,
    H: tl.constexpr,
    HG: tl.constexpr,
    BV: tl.constexpr,
    K_UNIT: tl.constexpr,
    STATE_UNIT: tl.constexpr,
    IS_VARLEN: tl.constexpr,
    USE_G: tl.constexpr,
    USE_GK: tl.constexpr,
    USE_INITIAL_STATE: tl.constexpr,
    STORE_FINAL_STATE: tl.constexpr,
    SAVE_NEW_VALUE: tl.constexpr,
    USE_INDICES: tl.constexpr,
    USE_STATE_MASK: tl.constexpr,
    G_HEAD_MAJOR: tl.constexpr,
    GATE_LOG2: tl.constexpr,
):
    NV: tl.constexpr = HEAD_DIM // BV
    pid = tl.program_id(0)
    i_v = pid % NV
    i_nh = pid // NV
    i_n = i_nh // H
    i_h = i_nh % H
    if IS_VARLEN:
        bos = tl.load(cu_seqlens + i_n).to(tl.int64)
        seq_len = (tl.load(cu_seqlens + i_n + 1) - bos).to(tl.int32)
        first_chunk = tl.load(chunk_offsets + i_n).to(tl.int64)
        row = i_h.to(tl.int64) * T + bos
        token = bos
        k += bos * stride_kt * K_UNIT
    else:
        seq_len = T
        first_chunk = i_n.to(tl.int64) * tl.cdiv(T, CHUNK)
        row = i_nh.to(tl.int64) * T
        token = i_n.to(tl.int64) * T
        k += i_n.to(tl.int64) * stride_kb * K_UNIT
    k += (i_h // (H // HG)) * stride_kh * K_UNIT
    w += row * HEAD_DIM
    u += row * HEAD_DIM + i_v * BV
    v_new += row * HEAD_DIM + i_v * BV
    h += (first_chunk * H + i_h) * HEAD_DIM * HEAD_DIM + i_v * BV * HEAD_DIM
    if G_HEAD_MAJOR:
        g += row
    else:
        g += token * H + i_h
    gk += (token * H + i_h) * HEAD_DIM

    offs_t = tl.arange(0, CHUNK)
    offs_k = tl.arange(0, HEAD_DIM)
    offs_v = tl.arange(0, BV)
    tile_vk = offs_v[:, None] * HEAD_DIM + offs_k[None, :]
    tile_tk = offs_t[:, None] * HEAD_DIM + offs_k[None, :]
    tile_tv = offs_t[:, None] * HEAD_DIM + offs_v[None, :]
    tile_k = (offs_t[:, None] * stride_kt) * K_UNIT + offs_k[None, :]

    if USE_INDICES:
        slot = tl.load(state_indices + i_n).to(tl.int64)
        owned = (slot >= 0) & (slot < num_slots)
        slot = tl.where(owned, slot, 0)
        owned_rows = tl.where(owned, BV, 0)  # the interpreter takes no scalar as the mask of a tile
    else:
        slot = i_n.to(tl.int64)
        owned_rows = BV
    state_tile = i_h * HEAD_DIM * HEAD_DIM + i_v * BV * HEAD_DIM + tile_vk
    if USE_INITIAL_STATE:
        readable_rows = owned_rows
        if USE_STATE_MASK:
            readable_rows = tl.where(tl.load(has_initial_state + i_n) != 0, owned_rows, 0)
        initial_state += slot * stride_in * STATE_UNIT
        state = tl.load(initial_state + state_tile, mask=offs_v[:, None] < readable_rows, other=0.0).to(tl.float32)
    else:
        state = tl.zeros([BV, HEAD_DIM], dtype=tl.float32)

    for start in range(0, seq_len, CHUNK):
        valid = offs_t < seq_len - start
        state16 = narrow(state, k.dtype.element_ty)
        if h.dtype.element_ty == tl.float32:
            tl.store(h + tile_vk, state)
        else:
            tl.store(h + tile_vk, state16)
        w_tile = tl.load(w + tile_tk, mask=valid[:, None], other=0.0)
        u_tile = tl.load(u + tile_tv, mask=valid[:, None], other=0.0)
        new = tl.trans(u_tile).to(tl.float32) - dot(state16, tl.trans(w_tile))
        if SAVE_NEW_VALUE:
            tl.store(v_new + tile_tv, tl.trans(narrow(new, u.dtype.element_ty)), mask=valid[:, None])
        if USE_G:
            if G_HEAD_MAJOR:
                gate = tl.load(g + offs_t, mask=valid, other=0.0)
                gate_last = tl.load(g + (tl.minimum(CHUNK, seq_len - start) - 1))
            else:
                gate = tl.load(g + offs_t * H, mask=valid, other=0.0)
                gate_last = tl.load(g + (tl.minimum(CHUNK, seq_len - start) - 1) * H)
            new *= exp2_gate(tl.where(valid, gate_last - gate, 0.0), GATE_LOG2)[None, :]
            state *= exp2_gate(gate_last, GATE_LOG2)
        if USE_GK:
            key_gate = tl.load(gk + (tl.minimum(CHUNK, seq_len - start) - 1) * H * HEAD_DIM + offs_k)
            state *= tl.exp2(key_gate * LOG2E)[None, :]
        k_tile = tl.load(k + tile_k, mask=valid[:, None], other=0.0)
        state = dot_add(narrow(new, k.dtype.element_ty), k_tile, state)

        h += H * HEAD_DIM * HEAD_DIM
        w += CHUNK * HEAD_DIM
        u += CHUNK * HEAD_DIM
        v_new += CHUNK * HEAD_DIM
        k += CHUNK * stride_kt.to(tl.int64) * K_UNIT
        gk += CHUNK * H * HEAD_DIM
        if G_HEAD_MAJOR:
            g += CHUNK
        else:
            g += CHUNK * H

    if STORE_FINAL_STATE:
        final_state += slot * stride_out * STATE_UNIT
        final = narrow(state, final_state.dtype.element_ty)
        tl.store(final_state + state_tile, final, mask=offs_v[:, None] < owned_rows)


def compile_jobs(spec: StateScanSpec) -> list[CompileJob]:
    """What ``state_scan`` compiles for ``spec``, rows of k and slots on 16-byte addresses and int32 slot indices.

    Raises UnsupportedError as ``spec.check``.
    """
    spec.check()
    data = f"*{TRITON_DTYPE[spec.dtype]}"
    state = f"*{TRITON_DTYPE[spec.state_dtype]}"
    types = dict.fromkeys(("k", "w", "u", "v_new"), data)
    types |= {"g": "*fp32" if spec.use_g else data, "gk": "*fp32" if spec.use_gk else data}
    types |= {"h": f"*{TRITON_DTYPE[spec.snapshot_dtype]}"}
    types |= {"initial_state": state if spec.use_initial_state else data}
    types |= {"final_state": state if spec.store_final_state else data}
    types |= {"state_indices": "*i32" if spec.use_state_indices else data}
    types |= {"has_initial_state": "*i1" if spec.use_state_mask else data}
    types |= dict.fromkeys(("cu_seqlens", "chunk_offsets"), "*i32" if spec.is_varlen else data)
    constants = {
        "H": spec.num_heads,
        "HG": spec.num_key_heads,
        "BV": spec.config.block_v,
        "K_UNIT": 8,
        "STATE_UNIT": 8,
        "IS_VARLEN": spec.is_varlen,
        "USE_G": spec.use_g,
        "USE_GK": spec.use_gk,
        "USE_INITIAL_STATE": spec.use_initial_state,
        "STORE_FINAL_STATE": spec.store_final_state,
        "SAVE_NEW_VALUE": spec.save_new_value,
        "USE_INDICES": spec.use_state_indices,
        "USE_STATE_MASK": spec.use_state_mask,
        "G_HEAD_MAJOR": spec.g_head_major,
        "GATE_LOG2": spec.use_exp2,
    }
    return [CompileJob.of(state_scan_kernel, types, constants, spec.config.num_warps, spec.config.num_stages)]


def state_scan(
    k: Tensor,
    w: Tensor,
    u: Tensor,
    *,
    g: Tensor | None,
    gk: Tensor | None,
    h: Tensor,
    v_new: Tensor | None,
    initial_state: Tensor | None,
    final_state: Tensor | None,
    state_indices: Tensor | None,
    has_initial_state: Tensor | None,
    plan: ChunkPlan,
    use_exp2: bool,
    g_head_major: bool,
    spec: StateScanSpec,
) -> None:
    """Launch K5. Shapes and dtypes: see ``gdn_runtime.chunk_gated_delta_rule_fwd_h``; outputs are preallocated.

    ``final_state`` may be ``initial_state`` itself: a program reads its own tile of a slot before it writes it, and no
    two programs own the same tile.
    """
    config = spec.config
    if plan.num_seqs == 0:
        return
    num_heads = u.shape[1]
    pool = initial_state if initial_state is not None else final_state
    placeholder = k
    k_unit, (stride_kb, stride_kt, stride_kh) = row_strides(k)
    state_strides = [0 if state is None else state.stride(0) for state in (initial_state, final_state)]
    # Slots may be any distance apart; whole units of 8 elements keep 16-byte accesses (see row_strides).
    state_unit = 1 if any(stride % 8 for stride in state_strides) else 8
    state_scan_kernel[(HEAD_DIM.value // config.block_v * plan.num_seqs * num_heads,)](
        k,
        w,
        u,
        placeholder if g is None else g,
        placeholder if gk is None else gk,
        h,
        placeholder if v_new is None else v_new,
        placeholder if initial_state is None else initial_state,
        placeholder if final_state is None else final_state,
        placeholder if state_indices is None else state_indices,
        placeholder if has_initial_state is None else has_initial_state,
        placeholder if plan.cu_seqlens is None else plan.cu_seqlens,
        placeholder if plan.chunk_offsets is None else plan.chunk_offsets,
        plan.seq_len,
        0 if pool is None else pool.shape[0],
        stride_kb,
        stride_kt,
        stride_kh,
        *(stride // state_unit for stride in state_strides),
        H=num_heads,
        HG=k.shape[2],
        BV=config.block_v,
        K_UNIT=k_unit,
        STATE_UNIT=state_unit,
        IS_VARLEN=plan.is_varlen,
        USE_G=g is not None,
        USE_GK=gk is not None,
        USE_INITIAL_STATE=initial_state is not None,
        STORE_FINAL_STATE=final_state is not None,
        SAVE_NEW_VALUE=v_new is not None,
        USE_INDICES=state_indices is not None,
        USE_STATE_MASK=has_initial_state is not None,
        G_HEAD_MAJOR=g_head_major,
        GATE_LOG2=use_exp2,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
