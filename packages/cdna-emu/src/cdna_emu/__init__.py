"""Runs AMD CDNA code objects (gfx942, gfx950) on a CPU, with checks and counters.

``launch`` runs a kernel; its ``Result`` has the findings and the counters. ``trace_group`` records
one workgroup, and ``simulate`` tells by a model how many cycles it would take.
"""

from cdna_emu import model, native
from cdna_emu.__about__ import __version__
from cdna_emu.codeobject import CodeObject, Kernel
from cdna_emu.counters import Counters, Resources
from cdna_emu.errors import CoreMissingError, EmulationError
from cdna_emu.machine import Result, launch
from cdna_emu.model import Parameters, Simulation, simulate
from cdna_emu.report import Finding, Report
from cdna_emu.trace import Trace, trace_group

native.find_core()  # whoever imports the package without it learns here how to get it

__all__ = [
    "CodeObject",
    "CoreMissingError",
    "Counters",
    "EmulationError",
    "Finding",
    "Kernel",
    "Parameters",
    "Report",
    "Resources",
    "Result",
    "Simulation",
    "Trace",
    "__version__",
    "launch",
    "model",
    "simulate",
    "trace_group",
]
