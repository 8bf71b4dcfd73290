"""From tuning to serving on the emulator (`nox -s roundtrip`): tune, export, check, compile, cover, run uncompiled.

    python ci/roundtrip.py [STORE] [gfx942|gfx950]

One small shape of each op is tuned by the emulator's model, and exported as tables; those are checked, and compiled
into a bundle that must hold all of what they ask for; then every row is run from that bundle on the emulator, nothing
may be compiled, and compared with the reference. STORE takes the place of the first step. Logs are in build/roundtrip.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import steps
from monorepo import ROOT, fail
from steps import Step

ARCHS = ("gfx942", "gfx950")
FOLDER = ROOT / "build" / "roundtrip"
GDN_CASE = "grid-dense-35b-tp8-1024-bf16"
CASES = {"k5": GDN_CASE, "prepare": GDN_CASE, "block": GDN_CASE, "pa": "pa-h8x1-p64-q1-b1-ctx8192"}
"""Of each op the smallest call of the benches."""
PYTHON = sys.executable


def plan(store: Path | None, arch: str) -> list[Step]:
    """The steps; ``store``: of samples that are there already."""
    tables, bundles = FOLDER / "tables", FOLDER / "bundles"
    # A cache of its own: what other runs compiled is no part of the proof.
    own = {"OMP_NUM_THREADS": "1", "GDN_JIT_CACHE_DIR": str(FOLDER / "code-objects")}
    found = []
    if store is None:
        store = FOLDER / "store.sqlite"
        for op, case in CASES.items():
            words = (PYTHON, "-m", "gdn_tune", "tune", op, "--arch", arch, "--cases", case, "--model")
            found.append(Step(f"tune {op}", "tune", (*words, "--store", str(store)), 900, own))
    aot, tune = (PYTHON, "-m", "gdn_aot"), (PYTHON, "-m", "gdn_tune")
    served = {**own, "GDN_TABLES": str(tables), "GDN_BUNDLE": str(bundles), "GDN_JIT": "0"}
    served["FLYDSL_RUNTIME_RUN_ONLY"] = "1"
    served["PYTHONPATH"] = str(ROOT / "packages" / "pa-decode" / "tests" / "support")
    rest: list[tuple[str, tuple[str, ...], dict[str, str]]] = [
        ("export", (*tune, "export", "--store", str(store), "--arch", arch, "--out", str(tables)), own),
        ("check", (*tune, "check", str(tables)), own),
        ("compile", (*aot, "build", "--arch", arch, "--table", str(tables), "--out", str(bundles)), own),
        ("verify", (*aot, "verify", str(bundles)), own),
        ("coverage", (*aot, "coverage", str(bundles), "--table", str(tables)), own),
        ("run", (PYTHON, "ci/run_rows.py", str(tables)), served),
    ]
    return found + [Step(name, name, command, 1800, env) for name, command, env in rest]


def main() -> None:
    archs = [word for word in sys.argv[1:] if word in ARCHS]
    stores = [Path(word).resolve() for word in sys.argv[1:] if word not in ARCHS]
    if len(archs) > 1 or len(stores) > 1:
        fail([f"arguments: got {' '.join(sys.argv[1:])}, expected at most a store and one of {', '.join(ARCHS)}"])
    absent = [str(store) for store in stores if not store.is_file()]
    if absent:
        fail([f"store: there is no {absent[0]}"])
    arch = archs[0] if archs else "gfx950"
    shutil.rmtree(FOLDER, ignore_errors=True)
    todo = plan(stores[0] if stores else None, arch)
    done = steps.run_all(todo, FOLDER, stop=True, echo=True)
    seconds = sum(each.seconds for each in done)
    print(steps.table(done, f"{arch}: {len(done)} of {len(todo)} steps, {seconds:.0f} s"), flush=True)
    if len(done) < len(todo) or any(each.status != "ok" for each in done):
        sys.exit(1)


if __name__ == "__main__":
    main()
