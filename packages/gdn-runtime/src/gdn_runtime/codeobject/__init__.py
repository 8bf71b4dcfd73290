"""The one path of every AMD kernel: spec -> code object -> launcher.

``code_object(spec)`` gives the code: bytes of an AMD ELF file and what a launch must know. A launcher loads and
launches it: ``hip.HipLauncher`` on a GPU, ``emulate.EmulatorLauncher`` on a CPU.
"""

from .bundle import Bundle, bundles, read_bundle
from .facts import CodeObject, KernelArgument, LaunchFacts
from .launch import Grid, Launcher, LoadedKernel, Value
from .source import code_object

__all__ = [
    "Bundle",
    "CodeObject",
    "Grid",
    "KernelArgument",
    "LaunchFacts",
    "Launcher",
    "LoadedKernel",
    "Value",
    "bundles",
    "code_object",
    "read_bundle",
]
