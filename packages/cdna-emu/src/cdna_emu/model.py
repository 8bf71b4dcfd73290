"""A timing model of a compute unit. A model, not a measurement: nothing here was compared with hardware.

It takes the counters of a launch and a handful of parameters, and says how many cycles the launch would need if every
unit of the device took just as long as the parameters say, and which of them takes longest. It is good for comparing
two builds of one kernel, and for seeing what bounds a kernel.

Per wave, each instruction costs its issue cycles; an ``s_waitcnt`` costs the latency of what it waits for, less the
cycles that were issued since. Per compute unit, the waves that fit at once share four SIMDs (VALU and MFMA), the LDS,
and the vector memory unit; a batch of workgroups takes the longest of one wave's own time and of each unit's busy time.
Batches follow one another without overlap.

It ignores: caches (all memory has one latency and one bandwidth), DRAM pages and channels, clock and power, instruction
fetch, time between workgroups, dependency stalls of VALU and MFMA results, dual issue of one wave, arbitration between
waves, contention of atomics, time at barriers, and imbalance between waves and between workgroups (it uses means).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from types import MappingProxyType

from cdna_emu.counters import SIMDS_PER_CU, Counters, Line

_WAITS = re.compile(r"\b(vmcnt|lgkmcnt)\(")
_DEFAULT_ISSUE = MappingProxyType(
    {
        "valu": 4.0,  # 64 lanes on 16
        "mfma": 4.0,
        "salu": 4.0,
        "branch": 16.0,
        "smem": 4.0,
        "vmem_load": 4.0,
        "vmem_store": 4.0,
        "vmem_atomic": 4.0,
        "lds_read": 4.0,
        "lds_write": 4.0,
        "lds_atomic": 4.0,
        "lds_lanes": 4.0,
        "wait": 4.0,
        "barrier": 16.0,
        "other": 4.0,
    }
)


@dataclass(frozen=True)
class Parameters:
    """What the model assumes; cycles are those of the compute unit's clock. Guesses of the right size, to be replaced.

    Attributes:
        compute_units: of the device. clock_ghz: turns cycles into time.
        issue: cycles for which a wave is occupied by issuing one instruction of a class (``counters.CLASSES``).
        memory_latency, scalar_latency, lds_latency: from issue to the result that an ``s_waitcnt`` waits for.
        memory_bytes_per_cycle: of one compute unit, in lines of 128 bytes that its accesses touch.
        address_cycles: cycles that the vector memory unit of a compute unit takes per 64-byte line.
    """

    compute_units: int = 304
    clock_ghz: float = 2.1
    issue: MappingProxyType[str, float] = field(default_factory=lambda: _DEFAULT_ISSUE)
    memory_latency: float = 700.0
    scalar_latency: float = 200.0
    lds_latency: float = 64.0
    memory_bytes_per_cycle: float = 16.0
    address_cycles: float = 1.0


MI300X = Parameters()
MI355X = Parameters(compute_units=256, clock_ghz=2.4)
DEFAULTS = MappingProxyType({"gfx942": MI300X, "gfx950": MI355X})


@dataclass(frozen=True)
class Estimate:
    """What the model gives for one launch.

    Attributes:
        cycles: of the whole launch. microseconds: the same at ``Parameters.clock_ghz``.
        batches: how many times every compute unit is filled. waves_per_cu: resident at once.
        bound: what takes longest: "wave" (issue and latency of one wave, which more waves would hide) or a unit.
        wave: cycles of the mean wave, by class, and "memory latency", "scalar latency", "lds latency" for waits.
        units: busy cycles of one compute unit per batch: "valu", "mfma" (the busiest SIMD), "lds", "vmem", "memory".
    """

    cycles: float
    microseconds: float
    batches: int
    waves_per_cu: int
    bound: str
    wave: dict[str, float]
    units: dict[str, float]

    def __str__(self) -> str:
        shares = sorted(self.wave.items(), key=lambda item: -item[1])
        rows = [f"  {name:<16}{cycles:>12.0f}" for name, cycles in shares if cycles >= 0.5]
        units = [f"  {name:<16}{cycles:>12.0f}" for name, cycles in self.units.items()]
        return "\n".join(
            [
                f"model, no measurement: {self.cycles:.0f} cycles, {self.microseconds:.1f} us; bound by {self.bound}",
                f"cycles of the mean wave ({self.batches} batches of {self.waves_per_cu} waves per compute unit):",
                *rows,
                "busy cycles of a compute unit per batch:",
                *units,
            ]
        )


def estimate(counters: Counters, parameters: Parameters | None = None) -> Estimate:
    """Cycles of a launch by the model; ``parameters`` default to those of the counters' architecture."""
    resources = counters.resources
    p = parameters or DEFAULTS[resources.arch]
    waves = max(1, counters.waves)
    wave = wave_cycles(counters.lines, waves, p)
    # A small grid does not fill the device: it is spread over all compute units first.
    resident = max(1, min(resources.groups_per_cu, math.ceil(counters.groups / p.compute_units)))
    batches = math.ceil(counters.groups / (resident * p.compute_units))
    waves_per_cu = resident * resources.waves
    per_simd = math.ceil(waves_per_cu / SIMDS_PER_CU)
    units = {
        "valu": per_simd * wave["valu"],
        "mfma": per_simd * counters.mfma_cycles / waves,
        "lds": waves_per_cu * counters.lds_cycles / waves,
        "vmem": waves_per_cu * p.address_cycles * counters.lines64 / waves,
        "memory": waves_per_cu * 128 * counters.lines128 / waves / p.memory_bytes_per_cycle,
    }
    own = sum(wave.values())
    bound, busiest = max(units.items(), key=lambda item: item[1])
    if own >= busiest:
        bound, busiest = "wave", own
    cycles = batches * busiest
    return Estimate(
        cycles=cycles,
        microseconds=cycles / p.clock_ghz / 1000,
        batches=batches,
        waves_per_cu=waves_per_cu,
        bound=bound,
        wave=wave,
        units=units,
    )


def wave_cycles(lines: list[Line], waves: int, p: Parameters) -> dict[str, float]:
    """Cycles of the mean wave by class, and latencies that its waits do not hide.

    Instructions are taken in the order of their addresses, each as often as a wave executed it on average.
    """
    cycles: dict[str, float] = dict.fromkeys(p.issue, 0.0)
    exposed = {"memory latency": 0.0, "scalar latency": 0.0, "lds latency": 0.0}
    # Cycles issued since the last request of each kind that nothing has waited for yet.
    since: dict[str, float] = {}
    latency = {"memory latency": p.memory_latency, "scalar latency": p.scalar_latency, "lds latency": p.lds_latency}
    for line in lines:
        executed = line.executed / waves
        if not executed:
            continue
        cost = p.issue[line.kind]
        cycles[line.kind] += executed * cost
        since = {name: value + cost for name, value in since.items()}
        if line.kind in {"vmem_load", "vmem_atomic"}:
            since["memory latency"] = 0.0
        elif line.kind == "smem":
            since["scalar latency"] = 0.0
        elif line.kind.startswith("lds"):
            since["lds latency"] = 0.0
        elif line.kind == "wait":
            counted = set(_WAITS.findall(line.text))
            for name in waited(counted, since):
                exposed[name] += executed * max(0.0, latency[name] - since.pop(name))
    return {**cycles, **exposed}


def waited(counters: set[str], since: dict[str, float]) -> list[str]:
    """The pending latencies that an s_waitcnt with these counters waits for."""
    names = {"memory latency": "vmcnt", "scalar latency": "lgkmcnt", "lds latency": "lgkmcnt"}
    return [name for name in since if names[name] in counters]
