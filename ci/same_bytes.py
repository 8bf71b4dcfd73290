"""Every artifact of bundle B is in bundle A, byte for byte: a rebuild, of all or of some, gives what there was.

python ci/same_bytes.py A B
"""

from __future__ import annotations

import sys
from pathlib import Path

from monorepo import fail


def main() -> None:
    before, after = map(Path, sys.argv[1:])
    rebuilt = sorted(path.name for path in after.glob("*.hsaco"))
    differ = [
        name
        for name in rebuilt
        if not (before / name).is_file() or (before / name).read_bytes() != (after / name).read_bytes()
    ]
    if differ or not rebuilt:
        fail([f"{after}: not the bytes of {before}: {', '.join(differ) or 'no artifact'}"])
    print(f"{len(rebuilt)} of {len(list(before.glob('*.hsaco')))} artifacts rebuilt: equal bytes")


if __name__ == "__main__":
    main()
