"""Command line: ``python -m gdn_runtime doctor | explain | env``."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import warnings
from collections.abc import Sequence

import torch

from . import doctor, env, select
from .__about__ import __version__
from .arch import ArchFacts, parse_arch

DTYPES = {name: dtype for dtype, name in select.DTYPES.items()}

MAX_SEQS = 1 << 20  # a repetition such as 1x999999999999 must not eat the memory


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns 0, or 1 where the user has to act; usage errors leave through argparse with 2."""
    args = _parser().parse_args(argv)
    return int(args.run(args))


def _doctor(args: argparse.Namespace) -> int:
    with warnings.catch_warnings():
        # The report names unknown variables itself.
        warnings.filterwarnings("ignore", message=env.PREFIX, category=RuntimeWarning)
        report = doctor.diagnose()
    sys.stdout.write(_json(report.as_dict()) if args.json else doctor.render(report))
    return 1 if report.problems else 0


def _env(args: argparse.Namespace) -> int:
    if args.markdown:
        sys.stdout.write(env.markdown())
        return 0
    readings, unknown = env.readings(), env.unknown()
    if args.json:
        variables = [
            {
                "name": reading.var.name,
                "value": reading.value,
                "source": reading.source,
                "error": reading.error,
                "default": reading.var.default,
                "choices": reading.var.choices,
                "help": reading.var.help,
            }
            for reading in readings
        ]
        sys.stdout.write(_json({"variables": variables, "unknown": unknown}))
    else:
        width = max(len(reading.var.name) for reading in readings)
        for reading in readings:
            print(f"{reading.var.name:<{width}}  {env.spell(reading.value) or '(empty)'}  [{reading.source}]")
            print(f"{'':<{width}}  {reading.var.help} Values: {reading.var.expected}.")
        for message in [reading.error for reading in readings if reading.error]:
            print(f"error: {message}", file=sys.stderr)
        for name, matches in unknown.items():
            print(f"warning: {env.describe_unknown(name, matches)}", file=sys.stderr)
    return 1 if unknown or any(reading.error for reading in readings) else 0


def _explain(args: argparse.Namespace) -> int:
    dtype = DTYPES[args.dtype]
    try:
        facts = _wanted_arch(args.arch)
        backend = env.settings().backend if args.backend == "auto" else args.backend
        if "emulate" in (backend, args.prepare_backend):
            default_device = "cpu"
        elif facts is None:
            default_device = "cuda" if torch.cuda.is_available() else "cpu"
        else:
            default_device = "cpu" if facts.vendor == "cpu" else "cuda"
        explanation = select.explain_shape(
            num_heads=args.heads,
            num_key_heads=args.heads if args.key_heads is None else args.key_heads,
            seq_lens=args.seq_lens if args.dense is None else args.dense,
            is_varlen=args.dense is None,
            dtype=dtype,
            state_dtype=DTYPES[args.state_dtype],
            snapshot_dtype=DTYPES[args.snapshot_dtype] if args.snapshot_dtype else dtype,
            device=args.device or torch.device(default_device),
            backend=args.backend,
            prepare_backend=args.prepare_backend,
            arch=facts.name if facts else None,
            use_state_indices=args.pool,
        )
    except ValueError as error:  # an UnsupportedError, or a variable with an illegal value
        print(f"error: {error}", file=sys.stderr)
        return 1
    sys.stdout.write(_json(explanation.as_dict()) if args.json else f"{explanation}\n")
    return 0


def _wanted_arch(option: str | None) -> ArchFacts | None:
    """The architecture asked for by --arch, else by GDN_ARCH; None: that of the device."""
    if option is not None:
        return parse_arch(option, name="--arch")
    from_env = env.settings().arch
    return parse_arch(from_env, name="GDN_ARCH") if from_env else None


def _json(data: object) -> str:
    return json.dumps(data, indent=2) + "\n"


def seq_lens(text: str) -> tuple[int, ...]:
    """Lengths such as "8192,1024" or "8192x4,17": comma between entries, LENGTHxCOUNT repeats one."""
    result: list[int] = []
    for item in text.split(","):
        length, sep, count = item.partition("x")
        try:
            length_, count_ = int(length), int(count) if sep else 1
        except ValueError:
            raise argparse.ArgumentTypeError(f"got {item!r}, expected LENGTH or LENGTHxCOUNT") from None
        if length_ < 0 or not 0 < count_ <= MAX_SEQS - len(result):
            raise argparse.ArgumentTypeError(f"got {item!r}, expected a length >= 0 and 1..{MAX_SEQS} sequences")
        result += [length_] * count_
    return tuple(result)


def dense(text: str) -> tuple[int, ...]:
    """ "B,T": B sequences of T tokens."""
    parts = text.split(",")
    if len(parts) != 2:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected B,T")
    return seq_lens(f"{parts[1]}x{parts[0]}")


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number >= 1")
    return int(text)


def device(text: str) -> torch.device:
    """A torch device: cpu, cuda, cuda:1."""
    try:
        return torch.device(text)
    except RuntimeError:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected cpu, cuda or cuda:INDEX") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m gdn_runtime",
        description="Look into an installation of gdn-runtime.",
        epilog="Example: python -m gdn_runtime doctor",
    )
    parser.add_argument("--version", action="version", version=f"gdn-runtime {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = _command(
        commands,
        "doctor",
        "check this machine: versions, devices, backends, caches, variables",
        "Exit status: 0 all is well, 1 something needs your attention (listed under problems), 2 wrong usage.",
        "python -m gdn_runtime doctor --json",
    )
    command.add_argument("--json", action="store_true", help="print the report as JSON")
    command.set_defaults(run=_doctor)

    command = _command(
        commands,
        "env",
        "list the environment variables with their values and where these come from",
        "Exit status: 0, or 1 if a GDN_ variable is unknown or has an illegal value.",
        "GDN_BACKEND=triton python -m gdn_runtime env",
    )
    form = command.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--markdown", action="store_true", help="print the page docs/environment.md")
    command.set_defaults(run=_env)

    command = _command(
        commands,
        "explain",
        "print the backend and kernel configuration that a call would use, and why",
        "Nothing is launched. Exit status: 1 if no backend can serve the call.",
        "python -m gdn_runtime explain --heads 32 --key-heads 16 --seq-lens 8192x2,17 --arch sm90",
    )
    command.add_argument("--heads", type=positive, required=True, metavar="H", help="value heads")
    command.add_argument("--key-heads", type=positive, metavar="Hg", help="query and key heads (default: as --heads)")
    lengths = command.add_mutually_exclusive_group(required=True)
    lengths.add_argument(
        "--seq-lens", type=seq_lens, metavar="N,N,..", help="packed sequences; 8192x4 repeats a length"
    )
    lengths.add_argument("--dense", type=dense, metavar="B,T", help="a dense batch: B sequences of T tokens")
    command.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16", help="of q, k and v (default: bf16)")
    command.add_argument(
        "--state-dtype", choices=("fp32", "bf16"), default="fp32", help="of the states (default: fp32)"
    )
    command.add_argument("--snapshot-dtype", choices=tuple(DTYPES), help="of the chunk states (default: as --dtype)")
    command.add_argument(
        "--device", type=device, metavar="DEV", help="cpu, cuda or cuda:N (default: a GPU if there is one)"
    )
    backends = next(var.choices for var in env.VARIABLES if var.attribute == "backend")
    command.add_argument(
        "--backend", choices=backends, default="auto", help="as the argument of a call (default: auto)"
    )
    command.add_argument("--prepare-backend", choices=backends[1:], help="another backend for stages K1..K4")
    command.add_argument("--arch", metavar="ARCH", help="plan for this architecture, e.g. gfx950; wins over GDN_ARCH")
    command.add_argument(
        "--pool", action="store_true", help="states live in a pool, addressed by initial_state_indices"
    )
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=_explain)
    return parser


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, summary: str, more: str, example: str
) -> argparse.ArgumentParser:
    return commands.add_parser(
        name, help=summary, description=f"{summary[0].upper()}{summary[1:]}. {more}", epilog=f"Example: {example}"
    )


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):  # `... | head` ends the program quietly, as with other tools; Windows has no SIGPIPE
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main())
