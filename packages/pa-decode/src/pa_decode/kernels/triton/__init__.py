"""Kernels in Triton, for NVIDIA and as code objects for AMD."""
