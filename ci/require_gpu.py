"""Exit 1, saying why, unless this interpreter can run the GPU suite: it has torch, triton, pytest and a device.

    python ci/require_gpu.py [gfx942|gfx950|sm90]

With an architecture the device must be of it; gdn-runtime must be importable then.
"""

from __future__ import annotations

import importlib.util
import sys


def main() -> None:
    arch = sys.argv[1] if len(sys.argv) > 1 else ""
    missing = [name for name in ("torch", "triton", "pytest") if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"{sys.executable} has no {', '.join(missing)}: set PYTHON to the interpreter that has them")
    import torch
    import triton

    versions = f"torch {torch.__version__}, triton {triton.__version__}"
    needed = f"a {arch} card" if arch else "a GPU"
    if not torch.cuda.is_available():
        sys.exit(f"needs {needed}, and torch finds no GPU ({versions})")
    names = versions
    if arch:
        from gdn_runtime.arch import arch_of, compute_units
        from gdn_runtime.errors import UnsupportedError

        device = torch.device("cuda", torch.cuda.current_device())
        try:
            found = arch_of(device).name
        except UnsupportedError as error:
            sys.exit(f"needs {needed}: {error} ({versions})")
        if found != arch:
            sys.exit(f"needs {needed}, and torch finds {torch.cuda.get_device_name()}, {found} ({versions})")
        names = f"{versions}, {found} with {compute_units(device)} compute units"
    print(f"{names}, {torch.cuda.device_count()} x {torch.cuda.get_device_name()}")


if __name__ == "__main__":
    main()
