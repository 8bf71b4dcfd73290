"""A change of packages/X/src comes with a fragment in packages/X/changes, or is the release that consumes them.

python ci/check_fragments.py [BASE]      compares the commits since they left BASE (default: origin/main)
"""

from __future__ import annotations

import subprocess
import sys

from monorepo import ROOT, Package, fail, git, packages


def main() -> None:
    base = sys.argv[1] if len(sys.argv) > 1 else "origin/main"
    try:
        changed = git("diff", "--name-only", "--diff-filter=d", f"{base}...HEAD")
    except subprocess.CalledProcessError as error:
        fail([f"cannot compare with {base}: {error.stderr.strip()}", "name a base: ./ci/nox -s changelog -- BASE"])
    problems = [problem for package in packages() for problem in check(package, changed)]
    if problems:
        fail(problems)
    print(f"changelog fragments agree with the {len(changed)} files changed since {base}")


def check(package: Package, changed: list[str]) -> list[str]:
    """What is wrong with the fragments of one package, given the changed paths."""
    kinds = [entry["directory"] for entry in package.tools["towncrier"]["type"]]
    problems = [
        f"{fragment.relative_to(ROOT)}: not named ISSUE.KIND.md with KIND one of {', '.join(kinds)}"
        for fragment in package.fragments
        if len(parts := fragment.name.split(".")) not in (3, 4) or parts[1] not in kinds
    ]
    folder = package.path.relative_to(ROOT).as_posix()
    touches_source = any(path.startswith(f"{folder}/src/") for path in changed)
    explained = any(path.startswith(f"{folder}/changes/") or path == f"{folder}/CHANGELOG.md" for path in changed)
    if touches_source and not explained:
        problems.append(f"{folder}/src changed without a fragment in {folder}/changes")
    return problems


if __name__ == "__main__":
    main()
