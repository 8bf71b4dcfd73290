"""Small FlyDSL kernels, one per family of instructions. Imported in a child process only (see ``flydsl_compile``).

Every ``launch_*`` names grid and block by its ``launch`` call; tensors are plain pointers in the kernel arguments.
"""

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr import rocdl
from flydsl.expr.rocdl import cdna4
from flydsl.expr.typing import T
from flydsl.expr.typing import Vector as Vec

WAVE = 64
THREADS = 256


def _part(tensor, lane, width):
    """The ``width`` elements of ``tensor`` that belong to ``lane``."""
    return fx.slice(fx.logical_divide(tensor, fx.make_layout(width, 1)), (None, lane))


@flyc.kernel
def buffer_copy(src: fx.Tensor, dst: fx.Tensor, used: fx.Int32):
    """Four floats per thread through buffer resources of ``used`` bytes: loads past them give 0."""
    tid = fx.thread_idx.x + fx.block_idx.x * fx.Int32(THREADS)
    source = fx.rocdl.make_buffer_tensor(src, num_records_bytes=used)
    target = fx.rocdl.make_buffer_tensor(dst, max_size=False)
    atom = fx.make_copy_atom(fx.rocdl.BufferCopy128b(), fx.Float32)
    values = fx.make_rmem_tensor(4, fx.Float32)
    fx.copy(atom, _part(source, tid, 4), values)
    fx.copy(atom, values, _part(target, tid, 4))


@flyc.jit
def launch_buffer_copy(src: fx.Tensor, dst: fx.Tensor, used: fx.Int32):
    buffer_copy(src, dst, used).launch(grid=(2, 1, 1), block=(THREADS, 1, 1))


@flyc.kernel
def buffer_short(src: fx.Tensor, dst: fx.Tensor, used: fx.Int32):
    """One 16-bit value per thread, bounded by ``used`` bytes on the way in and out."""
    tid = fx.thread_idx.x
    source = fx.rocdl.make_buffer_tensor(src, num_records_bytes=used)
    target = fx.rocdl.make_buffer_tensor(dst, num_records_bytes=used)
    atom = fx.make_copy_atom(fx.rocdl.BufferCopy16b(), fx.BFloat16)
    value = fx.make_rmem_tensor(1, fx.BFloat16)
    fx.copy(atom, _part(source, tid, 1), value)
    fx.copy(atom, value, _part(target, tid, 1))


@flyc.jit
def launch_buffer_short(src: fx.Tensor, dst: fx.Tensor, used: fx.Int32):
    buffer_short(src, dst, used).launch(grid=(1, 1, 1), block=(THREADS, 1, 1))


@flyc.kernel
def lds_reverse(src: fx.Tensor, dst: fx.Tensor):
    """The block's values in reverse order, through LDS and one barrier."""
    tid = fx.thread_idx.x
    shared = fx.get_dyn_shared(fx.Float32)
    fx.ptr_store(fx.ptr_load(fx.get_iter(src) + tid), shared + tid)
    fx.gpu.barrier()
    fx.ptr_store(fx.ptr_load(shared + (fx.Int32(THREADS - 1) - tid)), fx.get_iter(dst) + tid)


@flyc.jit
def launch_lds_reverse(src: fx.Tensor, dst: fx.Tensor):
    lds_reverse(src, dst).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), smem=4 * THREADS)


@flyc.kernel
def lds_direct(src: fx.Tensor, dst: fx.Tensor):
    """Global memory straight into LDS, 4 bytes per lane, then reversed within the block."""
    tid = fx.thread_idx.x
    shared = fx.get_dyn_shared(fx.Float32)
    wave = fx.Int32(rocdl.readfirstlane(T.i32, (tid // fx.Int32(WAVE)).ir_value()))
    tile = fx.make_view(shared + wave * fx.Int32(WAVE), fx.make_layout(1, 1))
    source = fx.rocdl.make_buffer_tensor(src, max_size=False)
    fx.copy(fx.make_copy_atom(fx.rocdl.BufferCopyLDS32b(), fx.Float32), _part(source, tid, 1), tile)
    rocdl.s_waitcnt(vmcnt=0)
    fx.gpu.barrier()
    fx.ptr_store(fx.ptr_load(shared + (fx.Int32(THREADS - 1) - tid)), fx.get_iter(dst) + tid)


@flyc.jit
def launch_lds_direct(src: fx.Tensor, dst: fx.Tensor):
    lds_direct(src, dst).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), smem=4 * THREADS)


@flyc.kernel
def mfma_bf16_k16(a: fx.Tensor, b: fx.Tensor, c: fx.Tensor):
    """c [16, 16] = a [16, 16] @ b [16, 16]^T, one MFMA of K = 16."""
    lane = fx.thread_idx.x
    row, group = lane % fx.Int32(16), lane // fx.Int32(16)
    start = row * fx.Int32(16) + group * fx.Int32(4)
    left = fx.ptr_load(fx.get_iter(a) + start, Vec.make_type(4, fx.BFloat16))
    right = fx.ptr_load(fx.get_iter(b) + start, Vec.make_type(4, fx.BFloat16))
    zero = Vec.filled(4, 0.0, fx.Float32)
    operands = [Vec(x, (4,), fx.BFloat16).bitcast(fx.Int16).ir_value() for x in (left, right)]
    sums = Vec(
        rocdl.mfma_f32_16x16x16bf16_1k(Vec.make_type(4, fx.Float32), [*operands, zero.ir_value()]), (4,), fx.Float32
    )
    for i in fx.range_constexpr(4):
        fx.ptr_store(sums[i], fx.get_iter(c) + ((group * fx.Int32(4) + fx.Int32(i)) * fx.Int32(16) + row))


@flyc.jit
def launch_mfma_bf16_k16(a: fx.Tensor, b: fx.Tensor, c: fx.Tensor):
    mfma_bf16_k16(a, b, c).launch(grid=(1, 1, 1), block=(WAVE, 1, 1))


@flyc.kernel
def mfma_bf16_k32(a: fx.Tensor, b: fx.Tensor, c: fx.Tensor):
    """c [16, 16] = a [16, 32] @ b [16, 32]^T, the MFMA of K = 32 that gfx950 adds."""
    lane = fx.thread_idx.x
    row, group = lane % fx.Int32(16), lane // fx.Int32(16)
    start = row * fx.Int32(32) + group * fx.Int32(8)
    left = fx.ptr_load(fx.get_iter(a) + start, Vec.make_type(8, fx.BFloat16))
    right = fx.ptr_load(fx.get_iter(b) + start, Vec.make_type(8, fx.BFloat16))
    zero = Vec.filled(4, 0.0, fx.Float32)
    operands = [Vec(x, (8,), fx.BFloat16).ir_value() for x in (left, right)]
    sums = Vec(
        rocdl.mfma_f32_16x16x32_bf16(Vec.make_type(4, fx.Float32), [*operands, zero.ir_value()]), (4,), fx.Float32
    )
    for i in fx.range_constexpr(4):
        fx.ptr_store(sums[i], fx.get_iter(c) + ((group * fx.Int32(4) + fx.Int32(i)) * fx.Int32(16) + row))


@flyc.jit
def launch_mfma_bf16_k32(a: fx.Tensor, b: fx.Tensor, c: fx.Tensor):
    mfma_bf16_k32(a, b, c).launch(grid=(1, 1, 1), block=(WAVE, 1, 1))


@flyc.kernel
def mfma_fp8(a: fx.Tensor, b: fx.Tensor, c: fx.Tensor):
    """c [16, 16] = a [16, 32] @ b [16, 32]^T of 8-bit floats, eight of them per int64 of ``a`` and ``b``."""
    lane = fx.thread_idx.x
    row, group = lane % fx.Int32(16), lane // fx.Int32(16)
    start = row * fx.Int32(4) + group
    operands = [fx.ptr_load(fx.get_iter(x) + start).ir_value() for x in (a, b)]
    zero = Vec.filled(4, 0.0, fx.Float32)
    sums = Vec(
        rocdl.mfma_f32_16x16x32_fp8_fp8(Vec.make_type(4, fx.Float32), [*operands, zero.ir_value()]), (4,), fx.Float32
    )
    for i in fx.range_constexpr(4):
        fx.ptr_store(sums[i], fx.get_iter(c) + ((group * fx.Int32(4) + fx.Int32(i)) * fx.Int32(16) + row))


@flyc.jit
def launch_mfma_fp8(a: fx.Tensor, b: fx.Tensor, c: fx.Tensor):
    mfma_fp8(a, b, c).launch(grid=(1, 1, 1), block=(WAVE, 1, 1))


@flyc.kernel
def lds_transpose(src: fx.Tensor, dst: fx.Tensor):
    """A [16, 16] bf16 tile in LDS, read by columns with ds_read_b64_tr_b16: four 16-bit values per lane to ``dst``."""
    lane = fx.thread_idx.x
    shared = fx.get_dyn_shared(fx.BFloat16)
    fx.ptr_store(
        fx.ptr_load(fx.get_iter(src) + lane * fx.Int32(4), Vec.make_type(4, fx.BFloat16)), shared + lane * fx.Int32(4)
    )
    fx.gpu.barrier()
    tile = fx.make_view(shared + lane * fx.Int32(4), fx.make_layout(4, 1))
    values = fx.make_rmem_tensor(4, fx.BFloat16)
    fx.copy(fx.make_copy_atom(cdna4.LDSReadTrans(16, 64), fx.BFloat16), tile, values)
    loaded = values.load()
    for i in fx.range_constexpr(4):
        fx.ptr_store(loaded[i], fx.get_iter(dst) + (lane * fx.Int32(4) + fx.Int32(i)))


@flyc.jit
def launch_lds_transpose(src: fx.Tensor, dst: fx.Tensor):
    lds_transpose(src, dst).launch(grid=(1, 1, 1), block=(WAVE, 1, 1), smem=512)


@flyc.kernel
def shuffles(src: fx.Tensor, dst: fx.Tensor):
    """Row r of ``dst`` [9, 64]: xor by 1, 2, 4, 8, 16, 32, up by 3, down by 5 and lane 9 for all."""
    lane = fx.thread_idx.x
    value = fx.ptr_load(fx.get_iter(src) + lane)
    out = fx.get_iter(dst) + lane
    for r, offset in enumerate((1, 2, 4, 8, 16, 32)):
        fx.ptr_store(fx.shuffle_xor(value, offset, WAVE), out + fx.Int32(r * WAVE))
    fx.ptr_store(fx.shuffle_up(value, 3, WAVE), out + fx.Int32(6 * WAVE))
    fx.ptr_store(fx.shuffle_down(value, 5, WAVE), out + fx.Int32(7 * WAVE))
    fx.ptr_store(fx.shuffle_idx(value, 9, WAVE), out + fx.Int32(8 * WAVE))


@flyc.jit
def launch_shuffles(src: fx.Tensor, dst: fx.Tensor):
    shuffles(src, dst).launch(grid=(1, 1, 1), block=(WAVE, 1, 1))


DPP_CONTROLS = (0x1B, 0x101, 0x113, 0x12F, 0x130, 0x138, 0x140, 0x141, 0x142, 0x143)
"""quad_perm:[3,2,1,0], row_shl:1, row_shr:3, row_ror:15, wave_shl:1, wave_shr:1, row_mirror, row_half_mirror,
row_bcast:15, row_bcast:31."""


@flyc.kernel
def dpp(src: fx.Tensor, dst: fx.Tensor):
    """Row r of ``dst`` [10, 64]: ``src`` moved by control r; lanes without a source keep -1."""
    lane = fx.thread_idx.x
    value = fx.ptr_load(fx.get_iter(src) + lane)
    old = fx.Int32(-1)
    for r, control in enumerate(DPP_CONTROLS):
        moved = fx.Int32(rocdl.update_dpp(T.i32, old.ir_value(), value.ir_value(), control, 0xF, 0xF, False))
        fx.ptr_store(moved, fx.get_iter(dst) + (lane + fx.Int32(r * WAVE)))


@flyc.jit
def launch_dpp(src: fx.Tensor, dst: fx.Tensor):
    dpp(src, dst).launch(grid=(1, 1, 1), block=(WAVE, 1, 1))


@flyc.kernel
def to_bf16(src: fx.Tensor, dst: fx.Tensor):
    """fp32 to bf16, to nearest even: one instruction on gfx950, integer arithmetic on gfx942."""
    tid = fx.thread_idx.x
    fx.ptr_store(fx.ptr_load(fx.get_iter(src) + tid).to(fx.BFloat16), fx.get_iter(dst) + tid)


@flyc.jit
def launch_to_bf16(src: fx.Tensor, dst: fx.Tensor):
    to_bf16(src, dst).launch(grid=(1, 1, 1), block=(THREADS, 1, 1))


@flyc.kernel
def to_fp8(src: fx.Tensor, dst: fx.Tensor):
    """Four fp32 values per lane packed to 8-bit floats of the architecture's own format, as one int32."""
    lane = fx.thread_idx.x
    values = Vec(fx.ptr_load(fx.get_iter(src) + lane * fx.Int32(4), Vec.make_type(4, fx.Float32)), (4,), fx.Float32)
    low = rocdl.cvt_pk_fp8_f32(T.i32, values[0], values[1], fx.Int32(0), False)
    packed = rocdl.cvt_pk_fp8_f32(T.i32, values[2], values[3], fx.Int32(low), True)
    fx.ptr_store(fx.Int32(packed), fx.get_iter(dst) + lane)


@flyc.jit
def launch_to_fp8(src: fx.Tensor, dst: fx.Tensor):
    to_fp8(src, dst).launch(grid=(1, 1, 1), block=(WAVE, 1, 1))
