"""Runners of the tuner's children that need no GPU: candidates of "k5" whose fate the case names."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

from gdn_tune.records import Facts
from gdn_tune.wire import key_values, parse_key, sample_values

from . import make_key, make_sample

WIDTHS = (16, 32, 64)


def run(job: Mapping[str, Any], report: Callable[[dict[str, Any]], None]) -> None:
    """Candidates 16, 32 and 64 of a case: "sound", or "FATE-WIDTH" for one that meets an end of its own. "settled": the
    process ends between two candidates."""
    fate, _, width = job["case"].partition("-")
    done = {parse_key(entry["key"]) for entry in job["done"]}
    if fate == "error":
        raise ValueError("no such device")
    if fate == "idle":
        os.kill(os.getpid(), signal.SIGKILL)
    if fate == "slow":
        time.sleep(float(width) / 1000)
    for block_v in WIDTHS:
        key = make_key(block_v, case=job["case"], facts=Facts(one=1), arch=job["arch"])
        if key in done:
            continue
        report({"start": key_values(key)})
        print("what a compiler prints is no report")
        if str(block_v) == width:
            if fate == "killed":
                os.kill(os.getpid(), signal.SIGSEGV)
            if fate == "exit":
                raise SystemExit("memory fault by GPU node-1")
            if fate == "fault":
                read_out_of_bounds()
            if fate == "hang":
                time.sleep(60)
        sample = make_sample(block_v, 10.0 + block_v, 11.0 + block_v, key=vars(key), host=str(os.getpid()))
        report({"sample": sample_values(sample)})
        if fate == "settled" and str(block_v) == width:
            os.kill(os.getpid(), signal.SIGKILL)


def read_out_of_bounds() -> None:
    """On a GPU: its context is lost, which the next wait tells."""
    import torch

    few = torch.zeros(4, device="cuda")
    few[torch.tensor([1 << 40], device="cuda")].sum()
    torch.cuda.synchronize()
