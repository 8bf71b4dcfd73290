"""Everything that is checked, built and shown in this repository: ``./ci/nox -l`` lists the sessions.

Every session runs on the Python that runs nox (3.11 or newer) and installs the versions of ci/constraints.txt with pip.
"""

from __future__ import annotations

import os
import shutil
import sys
import tomllib
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import nox
from nox.command import CommandFailed

ROOT = Path(__file__).parent
PACKAGES = [path.parent.relative_to(ROOT).as_posix() for path in sorted(ROOT.glob("packages/*/pyproject.toml"))]
SOURCES = os.pathsep.join(str(ROOT / package / "src") for package in PACKAGES)
TESTS = "packages/gdn-runtime/tests"
EMULATOR = "packages/cdna-emu"
AOT = "packages/gdn-aot"
TUNE = "packages/gdn-tune"
PA = "packages/pa-decode"
CONSTRAINTS = "ci/constraints.txt"
TRITON = "ci/triton.txt"
AMD_ARCHS = ("gfx942", "gfx950")
CARDS = (*AMD_ARCHS, "sm90")
SMOKE_BUNDLE = ROOT / "build" / "smoke-bundle"
BUNDLES = ROOT / "build" / "bundles"
FLYDSL_CACHE = ROOT / "build" / "flydsl-cache"
LINTERS = ("ruff", "mypy", "import-linter", "towncrier")

nox.needs_version = ">=2025.5"
nox.options.default_venv_backend = "venv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["lint", "types", "contracts", "tests"]


def install(session: nox.Session, *requirements: str) -> None:
    """Install pinned tools and libraries."""
    session.install("-c", CONSTRAINTS, *requirements)


def install_runtime(session: nox.Session, *requirements: str, extra: str = "", triton: bool = False) -> None:
    """Install torch, the given libraries, and gdn-runtime (editable); ``extra`` is "[name]" or empty."""
    # Without isolation the build backend is the pinned one too: constraints do not reach isolated builds.
    install(session, "hatchling", "torch", *requirements)
    session.install("-c", CONSTRAINTS, "--no-build-isolation", "-e", f"packages/gdn-runtime{extra}")
    if triton:
        session.install("--no-deps", "-r", TRITON)


def install_emulator(session: nox.Session) -> None:
    """Install cdna-emu (editable) beside gdn-runtime. A C compiler builds its core: the system's, else the one that the
    package ziglang brings, so that a machine with nothing but Python will do."""
    if not any(map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))):
        install(session, "ziglang")
        session.env["CC"] = f"{session.bin}/python -m ziglang cc"
    # FlyDSL: its kernels are input of the emulator's tests.
    session.install("-c", CONSTRAINTS, "--no-build-isolation", "-e", EMULATOR, "flydsl")


def install_aot(session: nox.Session) -> None:
    """Install gdn-aot (editable) with its compilers, and the emulator."""
    install_runtime(session, extra="[jit]", triton=True)
    install_emulator(session)
    session.install("-c", CONSTRAINTS, "--no-build-isolation", "-e", PA, "-e", AOT)


@nox.session
def demo(session: nox.Session) -> None:
    """Show the block at work on this machine: every backend that runs here, against the token recurrence."""
    install_runtime(session, "numpy", "rich", extra="[jit]", triton=True)
    install_emulator(session)
    session.install("-c", CONSTRAINTS, "--no-build-isolation", "-e", PA)
    session.run("python", "examples/demo.py", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the suites that need no GPU. Arguments go to pytest: ./ci/nox -s tests -- -n 0 -k pool."""
    install_runtime(session, extra="[test]", triton=True)
    install_emulator(session)
    session.install(
        "-c", CONSTRAINTS, "--no-build-isolation", "-e", f"{AOT}[dask]", "-e", PA, "-e", f"{TUNE}[dask,report]"
    )
    # Runs of their own, for Triton reads TRITON_INTERPRET at import.
    passed = {
        "cpu": run_suite(session, "cpu", f"{TESTS}/cpu", interpret=None),
        "interp": run_suite(session, "interp", f"{TESTS}/interp", interpret="1"),
        "emu": run_suite(session, "emu", f"{EMULATOR}/tests", interpret=None),
        "amd": run_suite(session, "amd", f"{TESTS}/emu", interpret=None),
        "aot": run_suite(session, "aot", f"{AOT}/tests", interpret=None),
        "ci": run_suite(session, "ci", "ci/tests", interpret=None),
        "tune": run_suite(session, "tune", f"{TUNE}/tests", f"--ignore={TUNE}/tests/gpu", interpret=None),
        "pa": run_suite(session, "pa", f"{PA}/tests/cpu", interpret=None),
        "pa-interp": run_suite(session, "pa-interp", f"{PA}/tests/interp", interpret="1"),
        "pa-emu": run_suite(session, "pa-emu", f"{PA}/tests/emu", interpret=None),
    }
    totals = [count_results(session, name) for name in passed]
    good, bad, skipped = (sum(column) for column in zip(*totals, strict=True))
    print(f"{good} passed, {bad} failed, {skipped} skipped", flush=True)
    if not good + bad:
        session.error("no test ran")
    if not all(passed.values()):
        session.error(f"failing suites: {', '.join(name for name, green in passed.items() if not green)}")


def run_suite(session: nox.Session, name: str, folder: str, *arguments: str, interpret: str | None) -> bool:
    """Run the tests of one folder; False if they fail. A selection may leave a suite empty: pytest exits 5."""
    report = report_path(session, name)
    report.unlink(missing_ok=True)
    command = ("python", "-m", "pytest", folder, "-n", "2", f"--junitxml={report}", *arguments, *session.posargs)
    # One thread per worker: two workers fill two cores.
    env: dict[str, str | None] = {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": interpret}
    try:
        session.run(*command, env=env, success_codes=[0, 5] if session.posargs else [0])
    except CommandFailed:
        return False
    return True


def report_path(session: nox.Session, name: str) -> Path:
    """Where pytest reports the results of one suite."""
    return Path(session.create_tmp()) / f"{name}.xml"


def count_results(session: nox.Session, name: str) -> tuple[int, int, int]:
    """Tests passed, failed and skipped of one suite. A suite that left no report died: one failure."""
    report = report_path(session, name)
    if not report.exists():
        return 0, 1, 0
    suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None, f"{report} holds no testsuite"
    total, failures, errors, skipped = (int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped"))
    return total - failures - errors - skipped, failures + errors, skipped


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, formatting and file sizes."""
    install(session, "ruff")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("python", "ci/check_sizes.py")


@nox.session
def types(session: nox.Session) -> None:
    """Check types (mypy, strict; the kernels are exempt)."""
    install(session, "hatchling", "matplotlib", "mypy", "nox", "numpy", "packaging", "rich", "torch", "typer")
    session.run("mypy", *session.posargs)


@nox.session
def contracts(session: nox.Session) -> None:
    """Check which module may import which (import-linter)."""
    linted = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["root_packages"]
    existing = [Path(package).name.replace("-", "_") for package in PACKAGES]
    if sorted(linted) != existing:
        session.error(f"pyproject.toml: importlinter.root_packages: got {linted}, expected {existing}")
    install(session, "import-linter")
    session.run("lint-imports", env={"PYTHONPATH": SOURCES})


@nox.session
def build(session: nox.Session) -> None:
    """Build the sdist of each package, and from it the wheel, into dist/; check what they hold."""
    install(session, "build", "hatchling", "packaging")
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    for package in PACKAGES:
        session.run("python", "-m", "build", "--no-isolation", "--outdir", "dist", package)
    session.run("python", "ci/check_dist.py")


@nox.session(name="smoke-bundle")
def smoke_bundle(session: nox.Session) -> None:
    """Compile the few kernels that prod-smoke runs, for both AMD architectures, into build/smoke-bundle."""
    install_aot(session)
    shutil.rmtree(SMOKE_BUNDLE, ignore_errors=True)
    session.run("python", "ci/smoke_bundle.py", str(SMOKE_BUNDLE), *AMD_ARCHS)


@nox.session(name="prod-smoke", requires=["build", "smoke-bundle"], reuse_venv=False)
def prod_smoke(session: nox.Session) -> None:
    """Use the built wheel in a fresh venv that holds nothing but it and torch; then, beside the emulator and pa-decode,
    run a bundle built elsewhere. Argument: a folder of bundles to run in place of that of smoke-bundle."""
    (wheel,) = ROOT.glob("dist/gdn_runtime-*.whl")
    install(session, str(wheel))
    # -I: neither PYTHONPATH nor the current folder may lead to the sources.
    session.run("python", "-I", "ci/prod_smoke.py")
    (emulator,), (decode,) = ROOT.glob("dist/cdna_emu-*.whl"), ROOT.glob("dist/pa_decode-*.whl")
    install(session, str(emulator), str(decode))
    bundles = Path(session.posargs[0] if session.posargs else SMOKE_BUNDLE).resolve()
    env = {"GDN_BUNDLE": str(bundles), "GDN_JIT": "0"}
    session.run("python", "-I", "ci/prod_smoke.py", *AMD_ARCHS, env=env)


def register_compile(arch: str) -> None:
    """Register compile-ARCH: a loop names sessions as nox.parametrize cannot."""

    @nox.session(name=f"compile-{arch}", tags=["compile"])
    def compile_arch(session: nox.Session) -> None:
        install_runtime(session, triton=True)
        session.run("python", "-m", "gdn_runtime.kernels.triton.crosscompile", "--arch", arch, *session.posargs)

    compile_arch.__doc__ = f"Compile every Triton kernel for {arch}; needs no GPU."


def register_emu(arch: str) -> None:
    """Register emu-ARCH: the tests of the emulator and of the AMD code objects that name the architecture."""

    @nox.session(name=f"emu-{arch}", tags=["emu"])
    def emu_arch(session: nox.Session) -> None:
        install_runtime(session, extra="[test]", triton=True)
        install_emulator(session)
        session.install("-c", CONSTRAINTS, "--no-build-isolation", "-e", PA)
        suites = {"emu": f"{EMULATOR}/tests", "amd": f"{TESTS}/emu", "pa-emu": f"{PA}/tests/emu"}
        passed = {name: run_suite(session, name, folder, "-k", arch, interpret=None) for name, folder in suites.items()}
        if not all(passed.values()):
            session.error(f"failing suites: {', '.join(name for name, green in passed.items() if not green)}")

    emu_arch.__doc__ = f"Run {arch} code objects on the emulator: its tests and those of the packages; needs no GPU."


def register_aot(arch: str) -> None:
    """Register aot-ARCH and aot-flydsl-ARCH."""

    @nox.session(name=f"aot-{arch}", tags=["aot"])
    def aot_arch(session: nox.Session) -> None:
        install_aot(session)
        bundle, again = BUNDLES / arch, ROOT / "build" / "bundles-again"
        build = ("gdn-aot", "build", "--arch", arch)
        session.run(*build, "--out", str(BUNDLES))
        session.run("gdn-aot", "verify", str(bundle))
        session.run("gdn-aot", "coverage", str(bundle))
        session.run("gdn-aot", "run", str(bundle), "--emulate", env={"OMP_NUM_THREADS": "1"})
        # Some of them, for time: every kernel language, other workers, another folder. `-- --kernel all` rebuilds all.
        shutil.rmtree(again, ignore_errors=True)
        some = session.posargs or ("--kernel", "prepare", "--kernel", "triton")
        session.run(*build, "--out", str(again), "--workers", "3", *some)
        session.run("python", "ci/same_bytes.py", str(bundle), str(again / arch))
        session.run("gdn-aot", "list", str(bundle))

    aot_arch.__doc__ = (
        f"Build, verify and run the {arch} bundle of the packaged tables in build/bundles, then rebuild a part and "
        "compare; needs no GPU, no ROCm and no compiler but those of pip."
    )

    @nox.session(name=f"aot-flydsl-{arch}", tags=["aot-flydsl"])
    def aot_flydsl_arch(session: nox.Session) -> None:
        install_aot(session)
        session.run("gdn-aot", "build", "--arch", arch, "--out", str(BUNDLES), "--flydsl-cache", str(FLYDSL_CACHE))
        session.run("gdn-aot", "flydsl-cache", str(FLYDSL_CACHE), str(BUNDLES / arch), *session.posargs)

    aot_flydsl_arch.__doc__ = f"Fill FlyDSL's own cache with its {arch} kernels, and find every one under run-only."


for _arch in AMD_ARCHS:
    register_compile(_arch)
    register_emu(_arch)
    register_aot(_arch)


@nox.session(requires=["build"])
def pack(session: nox.Session) -> None:
    """Pack the bundles that the aot sessions built, of one or both architectures, into dist/bundled: an archive and a
    wheel; check both, and use the wheel."""
    if not BUNDLES.is_dir():
        session.error("no bundles: run ./ci/nox -t aot")
    install_aot(session)
    (wheel,) = ROOT.glob("dist/gdn_runtime-*.whl")
    out = ROOT / "dist" / "bundled"
    archive = str(out / "gdn-bundles.tar")
    session.run("gdn-aot", "pack", str(BUNDLES), "--archive", archive, "--wheel", str(wheel), "--out", str(out))
    session.run("python", "ci/check_dist.py")
    (bundled,) = out.glob("*.whl")
    session.install("--no-deps", "--force-reinstall", str(bundled))
    session.run("python", "-I", "ci/prod_smoke.py", *sorted(path.name for path in BUNDLES.glob("gfx*")))


@nox.session
def roundtrip(session: nox.Session) -> None:
    """Tune one small shape of each op on the emulator, export and check the tables, compile what they ask for, and run
    it from the bundle with no compiler. Arguments: an architecture (gfx950), and a store in place of the tuning."""
    install_aot(session)
    session.install("-c", CONSTRAINTS, "--no-build-isolation", "-e", TUNE)
    session.run("python", "ci/roundtrip.py", *session.posargs)


@nox.session(name="sweep-gfx950")
def sweep_gfx950(session: nox.Session) -> None:
    """Run every configuration of paged decode on the gfx950 emulator, of which CI runs some; needs no GPU. Goes on
    where another run ended; ``-- --fresh`` starts anew."""
    install_runtime(session, extra="[test]", triton=True)
    install_emulator(session)
    session.install("-c", CONSTRAINTS, "--no-build-isolation", "-e", PA)
    if not run_suite(session, "sweep", f"{PA}/tests/sweep", interpret=None):
        session.error("the sweep failed")


@nox.session
def counters(session: nox.Session) -> None:
    """Count on the emulator what the AMD kernels execute; write it into docs/performance.md. Needs no GPU."""
    install_runtime(session, extra="[test]", triton=True)
    install_emulator(session)
    env = {"PYTHONPATH": f"{TESTS}/support", "OMP_NUM_THREADS": "1"}
    session.run("python", "benchmarks/counters.py", *session.posargs, env=env)


@nox.session(name="pa-counters")
def pa_counters(session: nox.Session) -> None:
    """Count on the emulator what the D256 pipe executes; write it into docs/performance.md. Needs no GPU."""
    install_runtime(session, extra="[test]", triton=True)
    install_emulator(session)
    session.install("-c", CONSTRAINTS, "--no-build-isolation", "-e", PA)
    env = {"PYTHONPATH": f"{TESTS}/support{os.pathsep}{PA}/tests/support", "OMP_NUM_THREADS": "1"}
    session.run("python", "benchmarks/pa_counters.py", *session.posargs, env=env)


@nox.session(venv_backend="none")
def gpu(session: nox.Session) -> None:
    """Run the GPU suite on the PyTorch and Triton of $PYTHON (default python3), from source. Fails without a GPU."""
    python = shutil.which(os.environ.get("PYTHON", "python3"))
    if python is None:
        session.error("no python3 found: set PYTHON to the interpreter that has torch")
    session.run(python, "ci/require_gpu.py", external=True)
    env = {"PYTHONPATH": SOURCES}
    session.run(
        python,
        "-m",
        "pytest",
        f"{TESTS}/gpu",
        f"{PA}/tests/gpu",
        f"{TUNE}/tests/gpu",
        *session.posargs,
        env=env,
        external=True,
    )


def register_gpu(arch: str) -> None:
    """Register gpu-ARCH."""

    @nox.session(name=f"gpu-{arch}", venv_backend="none", tags=["card"])
    def gpu_arch(session: nox.Session) -> None:
        python = shutil.which(os.environ.get("PYTHON", "python3"))
        if python is None:
            session.error("no python3 found: set PYTHON to the interpreter that has torch")
        session.run(python, "ci/on_card.py", arch, *session.posargs, external=True)

    gpu_arch.__doc__ = (
        f"Do all that a {arch} card is for, on the PyTorch and Triton of $PYTHON: tests, benches, tuning, tables, "
        "report. Fails without such a card. Arguments: -- --list, --only tests bench, --budget bench=600, --resume."
    )


for _arch in CARDS:
    register_gpu(_arch)


@nox.session
def docs(session: nox.Session) -> None:
    """Check that docs/environment.md is what the code says; ``-- --write`` regenerates it."""
    install_runtime(session)
    path = ROOT / "docs" / "environment.md"
    table = session.run("python", "-m", "gdn_runtime", "env", "--markdown", silent=True, stderr=None)
    assert isinstance(table, str)
    if "--write" in session.posargs:
        path.write_text(table)
    elif not path.exists() or path.read_text() != table:
        session.error("docs/environment.md is out of date: run ./ci/nox -s docs -- --write")


@nox.session
def changelog(session: nox.Session) -> None:
    """Check that changed packages have changelog fragments, and show them. Argument: the base (default origin/main)."""
    install(session, "towncrier")
    for package in PACKAGES:
        session.run("towncrier", "build", "--draft", "--dir", package, "--version", "unreleased")
    session.run("python", "ci/check_fragments.py", *session.posargs)


@nox.session(name="release-check")
def release_check(session: nox.Session) -> None:
    """Check that tags, versions, changelogs and sibling ranges agree. Arguments: tags to rehearse."""
    install(session, "packaging")
    session.run("python", "ci/check_release.py", *session.posargs)


@nox.session(venv_backend="none")
def dev(session: nox.Session) -> None:
    """Make .venv with every package editable and every tool of the other sessions."""
    session.run(sys.executable, "-m", "venv", ".venv", external=True)
    pip = (str(ROOT / ".venv" / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check")
    tools = (*LINTERS, "nox", "build", "hatchling", "rich")
    editable = [argument for package in PACKAGES for argument in ("-e", f"{package}[test]")]
    session.run(*pip, "-c", CONSTRAINTS, "torch", *tools, external=True)
    session.run(*pip, "-c", CONSTRAINTS, "--no-build-isolation", *editable, external=True)
    session.run(*pip, "--no-deps", "-r", TRITON, external=True)
    session.log("activate it with: . .venv/bin/activate")
