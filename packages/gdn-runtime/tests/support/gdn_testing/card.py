"""An AMD card as its suites see it, or the emulator in its place: the same calls on other memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Card:
    """``device`` has the tensors: a GPU of ``arch``, or the CPU, where code objects of ``arch`` run on the emulator."""

    device: torch.device
    arch: str

    @property
    def is_real(self) -> bool:
        """Whether there is a card."""
        return self.device.type == "cuda"

    @property
    def options(self) -> dict[str, Any]:
        """Of calls: the backend that launches code objects, and the architecture where no device has one."""
        return {"backend": "flydsl"} if self.is_real else {"backend": "emulate", "arch": self.arch}

    def wait(self) -> None:
        """Until what was launched has run."""
        if self.is_real:
            torch.cuda.synchronize(self.device)

    def replay_of(self, call: Callable[[], Any]) -> Callable[[], Any]:
        """What replays a graph that ``call``, which has run before, was captured in; it waits. The emulator has no
        graphs: ``call`` again."""
        if not self.is_real:
            return call
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()

        def replay() -> None:
            graph.replay()
            torch.cuda.synchronize()

        return replay
