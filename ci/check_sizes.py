"""Python files stay small: none over 900 lines, and the median of those that are not empty under 200."""

from __future__ import annotations

import statistics

from monorepo import ROOT, fail

MAX_LINES = 900
MEDIAN_LINES = 200
SOURCES = ("packages", "ci", "examples", "benchmarks")


def main() -> None:
    files = [ROOT / "noxfile.py", *(file for top in SOURCES for file in sorted((ROOT / top).rglob("*.py")))]
    lines = {file: len(file.read_text().splitlines()) for file in files}
    lines = {file: count for file, count in lines.items() if count}
    problems = [f"{f.relative_to(ROOT)}: {n} lines, at most {MAX_LINES}" for f, n in lines.items() if n > MAX_LINES]
    median = statistics.median(lines.values())
    if median >= MEDIAN_LINES:
        problems.append(f"median of {len(lines)} Python files: {median:g} lines, must be under {MEDIAN_LINES}")
    if problems:
        fail(problems)
    print(f"{len(lines)} Python files: median {median:g} lines, largest {max(lines.values())}")


if __name__ == "__main__":
    main()
