"""The prompts: the first bytes of this project's own documentation."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = ("docs/concepts.md", "docs/serving.md", "README.md")
SHARES = (0.45, 0.35, 0.2)
MIN_TOKENS, MAX_TOKENS = 32, 8192  # the largest share of 8192 is the size of the smallest of these files, or less


def prompts(tokens: int) -> list[bytes]:
    """A ragged batch of ``tokens`` bytes: a long text, none, a middling one, a single byte, a short one."""
    texts = [(ROOT / file).read_bytes()[: round(tokens * share)] for file, share in zip(FILES, SHARES, strict=True)]
    long, middle, short = texts
    return [long, b"", middle, short[:1], short[1:]]
