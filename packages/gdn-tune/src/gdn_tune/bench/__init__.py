"""The benches: K5, the block, snapshot dtypes, paged decode, and host cost of warm calls."""
