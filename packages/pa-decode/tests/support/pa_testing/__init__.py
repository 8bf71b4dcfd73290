"""What the suites of pa-decode share: inputs, a decode written token by token, calls, a backend of oracles."""

from .inputs import arguments_of, geometry_of, make_inputs
from .naive import naive_decode
from .oracle_kernels import OracleKernels, oracle_kernels

__all__ = ["OracleKernels", "arguments_of", "geometry_of", "make_inputs", "naive_decode", "oracle_kernels"]
