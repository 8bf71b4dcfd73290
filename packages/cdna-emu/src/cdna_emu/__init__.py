"""Runs AMD CDNA code objects (gfx942, gfx950) on a CPU, with checks and counters."""
