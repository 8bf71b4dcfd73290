"""Kernels that compilers made, and the means to run them: input that the authors of the emulator did not choose."""
