"""FlyDSL kernels, one module each with ``build(spec)``. Imported where kernels are compiled only."""
