"""Gated DeltaNet prefill and paged decode on this machine, checked: ``./ci/nox -s demo``, or see ``--help``."""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys

import torch
from gdn_demo import decode
from gdn_demo.check import Batch, measure
from gdn_demo.layer import GROUP, Layer
from gdn_demo.report import Report
from gdn_demo.texts import MAX_TOKENS, MIN_TOKENS, prompts

from gdn_runtime import UnsupportedError, env
from gdn_runtime.arch import arch_of
from gdn_runtime.spec import AMD_ARCHS

DESCRIPTION = """\
Prefills a ragged batch of texts (the documentation of this project, a token
per byte; one text is empty, one a single byte) through the Gated DeltaNet
block, at the head size and head ratio of Qwen3.5. Every text goes in two
passes over a state pool, and every backend that runs here is compared with
the token-by-token recurrence in fp64, over the unbroken texts. Then the last
four tokens of every text attend to a paged FP8 cache of an attention layer,
all of it or a window, with sinks; compared with the definition in fp64 and
with an oracle that rounds to FP8 as the kernels do:

  reference   plain torch, on the CPU
  triton      the GPU kernels: on a GPU if torch finds one, and on a smaller
              batch in Triton's interpreter on the CPU
  emulate     the code objects of the AMD backend flydsl, for gfx942 and
              gfx950, compiled here and run on the CPU by cdna-emu with all
              its checks, on the smaller batch
"""
EPILOG = "Exit status: 0 every error is within its bound, 1 one is not or a backend failed, 2 wrong usage."

SMALL_TOKENS, SMALL_HEADS = 160, 2
"""What the interpreter, which takes about 0.1 s for each program of a kernel's grid, finishes in seconds, and the
emulator too."""
INTERPRETED = ("--backend", "triton", "--tokens", str(SMALL_TOKENS), "--heads", str(SMALL_HEADS))
EMULATOR = ("cdna_emu", "flydsl", "triton", "elftools", "msgpack")
"""Modules that it takes to compile code objects and to run them."""


def main() -> int:
    args = parse_arguments()
    torch.set_num_threads(1)  # the tensors are small: threads spend more time waiting for each other than working
    report = Report()
    if args.backend in ("all", "reference", "triton"):
        batch = batch_of(report, args.tokens, args.heads, args.seed)
    if args.backend in ("all", "reference"):
        run(report, batch, "reference", "cpu")
        run_decode(report, args.tokens, args.seed, "reference", "cpu")
    if args.backend in ("all", "triton"):
        run_triton(report, batch, args)
    if args.backend in ("all", "emulate"):
        run_emulator(report, args)
    if args.json:
        print(report.as_json())
    else:
        from gdn_demo.table import show  # needs rich, which --json does not

        show(report)
    return 0 if report.ok else 1


def batch_of(report: Report, tokens: int, heads: int, seed: int, prefix: str = "") -> Batch:
    """The batch of ``tokens`` tokens, which the report says is run."""
    layer = Layer(heads, seed)
    batch = Batch.of([layer(text) for text in prompts(tokens)])
    lengths = ", ".join(str(len(rows)) for rows in batch.sequences)
    report.batches.append(f"{prefix}texts of {lengths} tokens, H = {heads}, Hg = {heads // GROUP}")
    return batch


def run_triton(report: Report, batch: Batch, args: argparse.Namespace) -> None:
    """Triton on a GPU, or interpreted where there is none: in another process, for Triton reads TRITON_INTERPRET at
    import."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        run(report, batch, "triton", "cpu")
        return
    if torch.cuda.is_available():
        run(report, batch, "triton", "cuda")
        if arch_of(torch.device("cuda")).vendor == "nvidia" and arch_of(torch.device("cuda")).fp8 is not None:
            run_decode(report, args.tokens, args.seed, "triton", "cuda")
        return
    report.notes.append("triton on a GPU (torch finds none)")
    missing = [name for name in ("triton", "numpy") if importlib.util.find_spec(name) is None]
    if missing:
        report.notes.append(f"triton in the interpreter ({' and '.join(missing)} not installed)")
    else:
        if not args.json:
            print("The Triton kernels in the interpreter take some seconds ...", file=sys.stderr)
        report.add_json(interpreted(args.seed), "in the interpreter")


def run_emulator(report: Report, args: argparse.Namespace) -> None:
    """The code objects of both AMD architectures, compiled in a process of their own and emulated in this one."""
    missing = [name for name in EMULATOR if importlib.util.find_spec(name) is None]
    if missing:
        report.notes.append(f"AMD code objects on the emulator ({' and '.join(missing)} not installed)")
        return
    if not args.json:
        print("Compiling code objects for gfx942 and gfx950 and emulating them takes a minute ...", file=sys.stderr)
    batch = batch_of(report, SMALL_TOKENS, SMALL_HEADS, args.seed, "on the emulator: ")
    with env.override(jit=True):
        for arch in AMD_ARCHS:
            run(report, batch, "emulate", "cpu", arch)
            run_decode(report, SMALL_TOKENS, args.seed, "emulate", "cpu", arch)


def run(report: Report, batch: Batch, backend: str, device: str, arch: str | None = None) -> None:
    """Add the rows of one backend."""
    try:
        rows, explanation = measure(batch, backend, torch.device(device), arch)
    except UnsupportedError as error:
        sys.exit(f"{backend} on {device}: {error}")
    report.rows += rows
    report.explain[f"the first prefill on {rows[0].device}"] = str(explanation)


def run_decode(report: Report, tokens: int, seed: int, backend: str, device: str, arch: str | None = None) -> None:
    """Add the rows of paged decode on one backend."""
    rows, explanation = decode.measure(prompts(tokens), backend, torch.device(device), arch, seed)
    report.rows += rows
    report.explain[f"decode with a window on {rows[0].device}"] = str(explanation)


def interpreted(seed: int) -> str:
    """This program's own JSON report about Triton in the interpreter, on a smaller batch."""
    command = (sys.executable, __file__, *INTERPRETED, "--seed", str(seed), "--json")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if not done.stdout:
        sys.exit(f"triton in the interpreter:\n{done.stderr}")
    return done.stdout


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--tokens", type=tokens, default=800, metavar="N", help="tokens of all texts together (default: 800)"
    )
    parser.add_argument("--heads", type=heads, default=4, metavar="H", help="value heads, an even number (default: 4)")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights of the layer (default: 0)")
    parser.add_argument(
        "--backend", choices=("all", "reference", "triton", "emulate"), default="all", help="what to run (default: all)"
    )
    return parser.parse_args()


def tokens(text: str) -> int:
    if not text.isdecimal() or not MIN_TOKENS <= int(text) <= MAX_TOKENS:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected {MIN_TOKENS} to {MAX_TOKENS}")
    return int(text)


def heads(text: str) -> int:
    if not text.isdecimal() or int(text) < GROUP or int(text) % GROUP:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a multiple of {GROUP}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
