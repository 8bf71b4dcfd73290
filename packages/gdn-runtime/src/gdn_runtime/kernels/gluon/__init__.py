"""Kernels of the fast path for sm90, in Gluon. Loaded lazily."""
