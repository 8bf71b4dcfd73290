"""Vocabulary of the FlyDSL kernels: lanes, LDS, memory, numbers. Imported only where kernels are compiled."""
