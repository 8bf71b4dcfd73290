"""The public operations: each validates, selects, allocates and launches."""
