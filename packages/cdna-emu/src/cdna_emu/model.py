"""A timing model of a compute unit. A model, not a measurement: nothing here was compared with hardware.

It takes the instruction streams of the waves of one workgroup (``cdna_emu.trace``) and a handful of parameters, and
says how many cycles the workgroup would need if every unit of the device took just as long as the parameters say, and
where they go. It is good for comparing two builds of one kernel, and for seeing what bounds a kernel.

What it does, instruction by instruction, in the order of the stream of each wave:

- A wave issues in order, one instruction per ``issue`` cycles; ``s_nop`` n takes n + 1 of them, a transcendental takes
  ``transcendental`` cycles. Waves of one SIMD share its VALU and its matrix unit, so that only one of them is served at
  a time; scalar instructions, branches and waits of other waves overlap.
- A matrix instruction waits until the matrix unit of its SIMD is free, and keeps it busy for its passes
  (``mfma_passes``). Who reads or overwrites its result waits for it; a matrix instruction that takes it as src C waits
  for the end of the passes alone.
- An LDS access takes the cycles that its addresses need on the banks (``counters.c``), one access of the compute unit
  after the other; its result is there ``lds_latency`` later.
- A global access takes max(4, 64-byte lines, bytes / 64) cycles of the compute unit's one address path; data of a load
  are there ``memory_latency`` later, a store is acknowledged ``store_latency`` later. One counter (vmcnt) counts both
  in order, so that a wait for a load also waits for the stores before it. LDS and address path see an access when it
  has been issued.
- ``s_waitcnt`` waits as it says. LDS accesses complete in order, scalar loads (``scalar_latency``) only all together.
- ``s_barrier`` opens ``barrier`` cycles after the last wave has issued it.

It ignores: caches and their misses (all memory has one latency, and no bandwidth but that of the address path), the
write path behind it and its back pressure, DRAM, clock and power, instruction fetch and branch penalties, dependency
stalls other than those of MFMA and of waits, register banks, dual issue, limits of the queues (LDS, vector memory,
counters at their maximum), LDS cycles of loads that go straight to LDS, the arbitration between waves (first come,
first served), contention of atomics, other compute units, and start and end of workgroups. Workgroups that share the
compute unit are copies of one. Store schemes are better ranked by the requests of ``Counters`` than by these cycles.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from cdna_emu.counters import CLASSES, SIMDS_PER_CU, busy_cycles, class_of
from cdna_emu.decode import Instruction
from cdna_emu.trace import Trace

_TRANSCENDENTAL = ("v_exp_", "v_log_", "v_rcp_", "v_rsq_", "v_sqrt_", "v_sin_", "v_cos_")
_VGPR0, _NO_OPERAND = 256, 0xFFFF
STALLS = ("valu busy", "mfma queue", "mfma result", "vm wait", "lgkm wait", "barrier wait")
"""Why a wave does not issue: another wave of its SIMD, matrix unit busy, result not there, s_waitcnt, s_barrier."""


@dataclass(frozen=True)
class Parameters:
    """What the model assumes; cycles are those of the compute unit's clock. Guesses of the right size, to be replaced.

    Attributes:
        compute_units: of the device. clock_ghz: turns cycles into time.
        issue: cycles of one instruction of a wave (64 lanes on 16). transcendental: of v_exp, v_rcp and their like.
        memory_latency, store_latency, scalar_latency, lds_latency: from the end of the access's turn to its completion.
        mfma_latency: cycles from the end of the passes until another instruction can read the result.
        barrier: cycles from the last arrival to the next instruction.
    """

    compute_units: int = 304
    clock_ghz: float = 2.1
    issue: int = 4
    transcendental: int = 16
    memory_latency: int = 650
    store_latency: int = 650
    scalar_latency: int = 200
    lds_latency: int = 64
    mfma_latency: int = 4
    barrier: int = 16


MI300X = Parameters()
MI355X = Parameters(compute_units=256, clock_ghz=2.4)
DEFAULTS = MappingProxyType({"gfx942": MI300X, "gfx950": MI355X})


@dataclass(frozen=True)
class Simulation:
    """What the model gives for the workgroups of one compute unit.

    Attributes:
        cycles: until the last wave has ended. groups: workgroups that ran side by side.
        wave: cycles of the mean wave: issue by class (``CLASSES``), and ``STALLS``; they add up to its time.
        units: busy cycles of the compute unit: "valu" and "mfma" (the busiest SIMD), "lds", "vmem".
        stalls: cycles of the mean wave by instruction (its text behind its address) and reason of ``STALLS``.
    """

    cycles: float
    groups: int
    wave: Mapping[str, float]
    units: Mapping[str, float]
    stalls: Mapping[tuple[str, str], float]

    def __sub__(self, other: Simulation) -> Simulation:
        """What a launch took beyond another: of one more chunk, the cost of a steady chunk."""
        stalls = {key: self.stalls.get(key, 0.0) - other.stalls.get(key, 0.0) for key in {*self.stalls, *other.stalls}}
        return replace(
            self,
            stalls={key: value for key, value in stalls.items() if value},
            cycles=self.cycles - other.cycles,
            wave={name: value - other.wave[name] for name, value in self.wave.items()},
            units={name: value - other.units[name] for name, value in self.units.items()},
        )

    def launch_cycles(self, workgroups: int, compute_units: int) -> float:
        """Cycles of a launch of so many equal workgroups, in batches that do not overlap."""
        return math.ceil(workgroups / (self.groups * compute_units)) * self.cycles

    def __str__(self) -> str:
        def rows(values: Mapping[str, float]) -> list[str]:
            found = sorted(values.items(), key=lambda item: -item[1])
            return [f"  {name:<16}{value:>12.0f}" for name, value in found if value >= 0.5]

        head = f"model, no measurement: {self.cycles:.0f} cycles, {self.groups} workgroups on a compute unit"
        return "\n".join(
            [head, "cycles of the mean wave:", *rows(self.wave), "busy cycles of the units:", *rows(self.units)]
        )

    def longest_stalls(self, count: int = 20) -> str:
        """The instructions at which the mean wave waits longest, one a line."""
        found = sorted(self.stalls.items(), key=lambda item: -item[1])[:count]
        return "\n".join(f"{cycles:>8.0f}  {reason:<12}  {text}" for (text, reason), cycles in found)

    def to_dict(self) -> dict[str, object]:
        """Plain values, for JSON."""
        return {"cycles": self.cycles, "groups": self.groups, "wave": dict(self.wave), "units": dict(self.units)}


# What an instruction does to the simulation.
_PLAIN, _VALU, _MFMA, _LDS, _LOAD, _STORE, _SMEM, _WAIT, _BARRIER = range(9)
_ACTIONS = {
    "valu": _VALU,
    "mfma": _MFMA,
    "smem": _SMEM,
    "vmem_load": _LOAD,
    "vmem_store": _STORE,
    "vmem_atomic": _LOAD,
    "lds_read": _LDS,
    "lds_write": _LDS,
    "lds_atomic": _LDS,
    "lds_lanes": _LDS,
    "wait": _WAIT,
    "barrier": _BARRIER,
}
_NO_WAIT = (63, 15)


@dataclass(frozen=True, slots=True)
class _Step:
    """The part of an instruction that is the same at every execution; ``registers`` in operand codes."""

    index: int  # of the instruction
    action: int
    kind: int  # index in CLASSES
    issue: int
    busy: int  # MFMA
    registers: tuple[int, ...]  # vector registers that it reads or writes
    results: tuple[int, ...]  # of an MFMA
    accumulator: int  # first register of src C of an MFMA, else -1
    vm: int
    lgkm: int


def _vector(code: int, count: int) -> range:
    return range(code, code + count) if _VGPR0 <= code < _NO_OPERAND else range(0)


def _step(index: int, instruction: Instruction, arch: str, p: Parameters) -> _Step:
    record, name = instruction.record, instruction.mnemonic
    kind = class_of(name)
    action = _ACTIONS.get(kind, _PLAIN)
    issue = p.issue
    if kind == "valu" and name.startswith(_TRANSCENDENTAL):
        issue = p.transcendental
    elif name == "s_nop":
        issue = p.issue * (1 + (record.offset & 15))
    operands = [record.dst, record.sdst, *record.src]
    results: tuple[int, ...] = ()
    accumulator, busy = -1, 0
    if action == _MFMA:
        busy = busy_cycles(instruction, arch)
        results = tuple(_vector(record.dst.code, record.dst.registers))
        operands = list(record.src)  # the results of one matrix unit come in order
        if _vector(record.src[2].code, 1) and record.src[2].registers == record.dst.registers:
            accumulator = record.src[2].code
            operands = [o for o in operands if o.code != accumulator]
    registers = {r for o in operands for r in _vector(o.code, o.registers)}
    vm, lgkm = _NO_WAIT
    if name == "s_waitcnt":
        immediate = record.offset & 0xFFFF
        vm, lgkm = immediate & 15 | (immediate >> 14 & 3) << 4, immediate >> 8 & 15
    return _Step(index, action, CLASSES.index(kind), issue, busy, tuple(registers), results, accumulator, vm, lgkm)


class _Wave:
    """One wave while it runs: where its time went, and what is still under way for it."""

    __slots__ = (
        *("at", "barrier", "busy", "costs", "group", "last", "lds", "ready"),
        *("scalar", "simd", "stalls", "steps", "vm"),
    )

    def __init__(self, steps: Sequence[_Step], costs: Sequence[int], group: int, simd: int) -> None:
        self.steps, self.costs, self.group, self.simd = steps, costs, group, simd
        self.at = 0  # next step
        self.barrier = -1  # when it came to the barrier where it waits, -1: it does not wait
        self.busy = [0] * len(CLASSES)
        self.stalls: Counter[tuple[int, str]] = Counter()  # by instruction and reason
        self.ready: dict[int, tuple[int, int]] = {}  # register: end of the passes, result readable
        self.last = 0  # the latest of them
        self.vm: deque[int] = deque()  # completions, in order
        self.lds: deque[int] = deque()
        self.scalar = 0


_VALU_BUSY, _MFMA_QUEUE, _MFMA_RESULT, _VM_WAIT, _LGKM_WAIT, _BARRIER_WAIT = STALLS


def _streams(trace: Trace, p: Parameters) -> list[tuple[list[_Step], list[int]]]:
    """Per wave its steps, and the cycles that each takes of the LDS or of the address path."""
    arch = trace.resources.arch
    events = trace.events
    step = functools.cache(lambda index: _step(index, trace.instructions[index], arch, p))
    path = np.zeros(1 + len(trace.accesses), np.int64)
    if len(trace.accesses):
        lanes = np.bitwise_count(trace.accesses["mask"]).astype(np.int64)
        path[1:] = np.maximum(
            np.maximum(4, trace.lines(64)), -(-lanes * trace.accesses["bytes"].astype(np.int64) // 64)
        )
    costs = np.where(events["access"] > 0, path[events["access"]], events["lds_cycles"].astype(np.int64))
    streams = []
    for wave in range(trace.waves):
        own = events["wave"] == wave
        streams.append(([step(index) for index in events["insn"][own].tolist()], costs[own].tolist()))
    return streams


def simulate(trace: Trace, parameters: Parameters | None = None, *, groups: int = 1) -> Simulation:
    """Cycles of ``groups`` copies of a traced workgroup that share a compute unit and start together.

    ``parameters`` default to those of the trace's architecture. ValueError: ``groups`` is not positive. Takes a second
    for some 300,000 instructions.
    """
    if groups < 1:
        raise ValueError(f"groups: got {groups}, expected a positive number")
    p = parameters or DEFAULTS[trace.resources.arch]
    streams = _streams(trace, p)
    waves = [
        _Wave(steps, costs, group, (group * len(streams) + index) % SIMDS_PER_CU)
        for group in range(groups)
        for index, (steps, costs) in enumerate(streams)
    ]
    valu, matrix = [0] * SIMDS_PER_CU, [0] * SIMDS_PER_CU
    units = {"lds": 0, "vmem": 0}
    lds = vmem = end = 0
    valu_busy, matrix_busy = [0] * SIMDS_PER_CU, [0] * SIMDS_PER_CU
    # The wave that can issue first is served first: units are taken in the order of time.
    queue = [(0, number) for number in range(len(waves))]
    while queue:
        now, number = heapq.heappop(queue)
        wave = waves[number]
        horizon = queue[0][0] if queue else 1 << 62
        steps, costs, busy, at = wave.steps, wave.costs, wave.busy, wave.at
        while at < len(steps) and now <= horizon:
            step = steps[at]
            action = step.action
            if now < wave.last and action not in (_PLAIN, _WAIT, _BARRIER):
                ready = max((wave.ready[r][1] for r in step.registers if r in wave.ready), default=0)
                if step.accumulator >= 0 and step.accumulator in wave.ready:
                    ready = max(ready, wave.ready[step.accumulator][0])
                if ready > now:
                    wave.stalls[step.index, _MFMA_RESULT] += ready - now
                    now = ready
                    continue
            if action in (_VALU, _MFMA):
                free = valu[wave.simd]
                if free > now:
                    wave.stalls[step.index, _VALU_BUSY] += free - now
                    now = free
                    continue
                if action == _MFMA:
                    free = matrix[wave.simd]
                    if free > now:
                        wave.stalls[step.index, _MFMA_QUEUE] += free - now
                        now = free
                        continue
                    done = now + step.busy
                    matrix[wave.simd] = done
                    matrix_busy[wave.simd] += step.busy
                    wave.last = max(wave.last, done + p.mfma_latency)
                    for register in step.results:
                        wave.ready[register] = (done, done + p.mfma_latency)
                valu[wave.simd] = now + step.issue
                valu_busy[wave.simd] += step.issue
            elif action == _LDS:
                lds = max(lds, now + step.issue) + costs[at]
                units["lds"] += costs[at]
                wave.lds.append(lds + p.lds_latency)
            elif action in (_LOAD, _STORE):
                vmem = max(vmem, now + step.issue) + costs[at]
                units["vmem"] += costs[at]
                done = vmem + (p.memory_latency if action == _LOAD else p.store_latency)
                wave.vm.append(max(done, wave.vm[-1]) if wave.vm else done)
            elif action == _SMEM:
                wave.scalar = max(wave.scalar, now + step.issue + p.scalar_latency)
            elif action == _WAIT:
                now = _wait(wave, step, now + step.issue)
                busy[step.kind] += step.issue
                at += 1
                continue
            busy[step.kind] += step.issue
            now += step.issue
            at += 1
            if action == _BARRIER:
                wave.barrier = now
                break
        wave.at = at
        if wave.barrier >= 0 or at == len(steps):
            end = max(end, now)
            _open(waves, wave.group, now, p, queue)
        else:
            heapq.heappush(queue, (now, number))
    mean = {name: sum(wave.busy[k] for wave in waves) / len(waves) for k, name in enumerate(CLASSES)}
    mean.update(dict.fromkeys(STALLS, 0.0))
    stalls: dict[tuple[str, str], float] = {}
    for (index, reason), cycles in sum((wave.stalls for wave in waves), Counter()).items():
        instruction = trace.instructions[index]
        stalls[f"{instruction.address:#06x} {instruction.text}", reason] = cycles / len(waves)
        mean[reason] += cycles / len(waves)
    return Simulation(end, groups, mean, {"valu": max(valu_busy), "mfma": max(matrix_busy), **units}, stalls)


def _wait(wave: _Wave, step: _Step, now: int) -> int:
    """Time after an s_waitcnt that could end now."""
    if step.vm < _NO_WAIT[0]:
        while len(wave.vm) > step.vm:
            done = wave.vm.popleft()
            if done > now:
                wave.stalls[step.index, _VM_WAIT] += done - now
                now = done
    if step.lgkm < _NO_WAIT[1]:
        done = 0
        while len(wave.lds) > step.lgkm:
            done = wave.lds.popleft()
        if step.lgkm == 0:
            done = max(done, wave.scalar)
        if done > now:
            wave.stalls[step.index, _LGKM_WAIT] += done - now
            now = done
    return now


def _open(waves: Sequence[_Wave], group: int, now: int, p: Parameters, queue: list[tuple[int, int]]) -> None:
    """Let the waves of a workgroup go on if all that have not ended are at a barrier; one has come there, or ended."""
    waiting = [(k, wave) for k, wave in enumerate(waves) if wave.group == group and wave.barrier >= 0]
    running = [w for w in waves if w.group == group and w.barrier < 0 and w.at < len(w.steps)]
    if running or not waiting:
        return
    opens = max(now, *(wave.barrier for _, wave in waiting)) + p.barrier
    for number, wave in waiting:
        wave.stalls[wave.steps[wave.at - 1].index, _BARRIER_WAIT] += opens - wave.barrier
        wave.barrier = -1
        heapq.heappush(queue, (opens, number))
