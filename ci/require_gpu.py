"""Exit 1, saying why, unless this interpreter can run the GPU suite: it has torch, triton, pytest and a device."""

from __future__ import annotations

import importlib.util
import sys


def main() -> None:
    missing = [name for name in ("torch", "triton", "pytest") if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"{sys.executable} has no {', '.join(missing)}: set PYTHON to the interpreter that has them")
    import torch
    import triton

    versions = f"torch {torch.__version__}, triton {triton.__version__}"
    if not torch.cuda.is_available():
        sys.exit(f"the gpu session needs a GPU, and torch finds none ({versions})")
    print(f"{versions}, {torch.cuda.device_count()} x {torch.cuda.get_device_name()}")


if __name__ == "__main__":
    main()
