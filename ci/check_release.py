"""Tag, version, changelog and sibling ranges of every package agree.

python ci/check_release.py [TAG...]      checks HEAD as if it carried TAG as well (a rehearsal before tagging)
"""

from __future__ import annotations

import sys

from packaging.requirements import Requirement
from packaging.version import Version

from monorepo import Package, fail, git, packages


def main() -> None:
    found = packages()
    tags = sys.argv[1:] + git("tag", "--points-at", "HEAD")
    versions = {package.name: package.version for package in found}
    problems = [problem for package in found for problem in check(package, tags, versions)]
    names = {package.name for package in found}
    problems += [f"{tag}: no package of that name" for tag in sys.argv[1:] if tag.rpartition("-v")[0] not in names]
    if problems:
        fail(problems)
    for package in found:
        print(f"{package.name} {package.version}: newest changelog entry {package.released or 'none yet'}")


def check(package: Package, tags: list[str], versions: dict[str, str]) -> list[str]:
    """What disagrees in one package, given the tags of HEAD and the versions of all packages."""
    name, version, released = package.name, package.version, package.released
    problems = []
    if released and Version(released) > Version(version):
        problems.append(f"{name}: CHANGELOG.md describes {released}, __about__.py says {version}")
    for tag in tags:
        if tag.rpartition("-v")[0] != name:
            continue
        if tag != f"{name}-v{version}":
            problems.append(f"{name}: tagged {tag}, __about__.py says {version}")
        if released != version:
            problems.append(f"{name}: tagged {tag}, the newest entry of CHANGELOG.md is {released or 'missing'}")
        if package.fragments:
            listed = ", ".join(fragment.name for fragment in package.fragments)
            problems.append(f"{name}: tagged {tag}, but changes/ still holds {listed}")
    optional = package.project.get("optional-dependencies", {}).values()
    for line in [*package.project.get("dependencies", []), *(line for extra in optional for line in extra)]:
        requirement = Requirement(line)
        sibling = versions.get(requirement.name)
        if sibling is None:
            continue
        if not requirement.specifier:
            problems.append(f"{name}: depends on {requirement.name} without a version range")
        elif not requirement.specifier.contains(sibling, prereleases=True):
            problems.append(f"{name}: depends on {requirement}, the repository has {sibling}")
    return problems


if __name__ == "__main__":
    main()
