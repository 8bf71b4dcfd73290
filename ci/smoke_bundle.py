"""Build the bundles that ci/prod_smoke.py runs: its kernels for each architecture, compiled in this venv.

python ci/smoke_bundle.py OUT gfx942 gfx950
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pa_decode
import prod_smoke
from gdn_aot.bundle import kept_folder, write_bundle
from gdn_aot.pool import compile_all
from gdn_runtime import explain
from gdn_runtime.tables import PACKAGED
from pa_decode.schedule import planner_of


def main() -> None:
    out, archs = Path(sys.argv[1]), sys.argv[2:]
    *data, pool, cu_seqlens = prod_smoke.make_inputs(prod_smoke.VALUE_HEADS)
    options = prod_smoke.call_options(pool, cu_seqlens)
    for arch in archs:
        chosen = explain(*data, **options, backend="emulate", arch=arch)
        decode = pa_decode.explain(**prod_smoke.decode_inputs(pa_decode, arch), backend="emulate", arch=arch)
        planner = planner_of(arch, len(prod_smoke.CONTEXTS))
        specs: list[Any] = [chosen.l2norm, chosen.prepare, chosen.state_scan, chosen.output]
        specs += [decode.attention, decode.reduce, planner]
        outcomes = compile_all(specs, kept=kept_folder(out))
        failures = [outcome.error for outcome in outcomes if outcome.error]
        if failures:
            sys.exit("\n".join(failures))
        folder = write_bundle(out, arch, [outcome.code for outcome in outcomes if outcome.code], [PACKAGED])
        print(f"{folder}: {', '.join(spec.kernel for spec in specs)}")


if __name__ == "__main__":
    main()
