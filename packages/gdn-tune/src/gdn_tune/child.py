"""The process that runs trials: jobs come as lines of JSON on standard input, reports go as lines to what was standard
output. What kernels and compilers print goes to standard error."""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
import threading
import time
from typing import Any, TextIO


def main() -> None:
    """Serve jobs until there are no more, or whoever gives them is gone: a card is not kept busy for nobody."""
    threading.Thread(target=_leave_with, args=(os.getppid(),), daemon=True).start()
    reports = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        job = json.loads(line)
        module, _, name = job["runner"].partition(":")
        report = functools.partial(_report, reports)
        try:
            getattr(importlib.import_module(module), name)(job, report)
        except (ValueError, ImportError) as error:
            report({"error": f"{type(error).__name__}: {error}"})
        report({"end": True})


def _leave_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _report(reports: TextIO, values: dict[str, Any]) -> None:
    reports.write(json.dumps(values) + "\n")
    reports.flush()


if __name__ == "__main__":
    main()
