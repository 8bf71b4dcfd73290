"""The parts of examples/demo.py: a Gated DeltaNet layer over text, a server that prefills in two passes, the report."""
