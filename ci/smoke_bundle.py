"""Build the bundles that ci/prod_smoke.py runs: its four kernels for each architecture, compiled in this venv.

    python ci/smoke_bundle.py OUT gfx942 gfx950

OUT must not hold them yet.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import prod_smoke
from gdn_runtime import explain
from gdn_runtime.kernels.compile import compile_spec


def main() -> None:
    # By name: the test helpers are on the path in the session alone.
    write_bundle: Any = importlib.import_module("gdn_testing.bundles").write_bundle
    out, archs = Path(sys.argv[1]), sys.argv[2:]
    *data, pool, cu_seqlens = prod_smoke.make_inputs(prod_smoke.VALUE_HEADS)
    options = prod_smoke.call_options(pool, cu_seqlens)
    for arch in archs:
        chosen = explain(*data, **options, backend="emulate", arch=arch)
        specs: tuple[Any, ...] = (chosen.l2norm, chosen.prepare, chosen.state_scan, chosen.output)
        folder = write_bundle(out / arch, [compile_spec(spec) for spec in specs], arch)
        print(f"{folder}: {', '.join(spec.kernel for spec in specs)}")


if __name__ == "__main__":
    main()
