"""Kernels that compilers made, and the means to run them on the emulator: input that the emulator's authors did not choose."""
