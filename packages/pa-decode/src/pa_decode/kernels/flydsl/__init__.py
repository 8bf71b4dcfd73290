"""Kernels in FlyDSL."""
