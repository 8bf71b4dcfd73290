"""A second implementation of the arithmetic in numpy: slow, from the definitions, sharing nothing with the core.

formats: narrow floats by table look-up. exact: fused multiply-add without the host's. mfma: matrix instructions from
the matrix element to its register. valu: common vector instructions.
"""
