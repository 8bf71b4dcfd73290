"""Vocabulary of the FlyDSL kernels: what a lane holds, LDS, memory, numbers. Imported where kernels are compiled only."""
