"""Runs AMD CDNA code objects (gfx942, gfx950) on a CPU, with checks and counters.

``launch`` runs a kernel; its ``Result`` has the findings and the counters. ``model`` estimates cycles from counters.
"""

from cdna_emu import model, native
from cdna_emu.__about__ import __version__
from cdna_emu.codeobject import CodeObject, Kernel
from cdna_emu.counters import Counters, Resources
from cdna_emu.errors import CoreMissingError, EmulationError
from cdna_emu.machine import Result, launch
from cdna_emu.model import Estimate, Parameters, estimate
from cdna_emu.report import Finding, Report

native.find_core()  # whoever imports the package without it learns here how to get it

__all__ = [
    "CodeObject",
    "CoreMissingError",
    "Counters",
    "EmulationError",
    "Estimate",
    "Finding",
    "Kernel",
    "Parameters",
    "Report",
    "Resources",
    "Result",
    "__version__",
    "estimate",
    "launch",
    "model",
]
