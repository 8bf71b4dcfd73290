"""torch.library registration: ops with out-parameters in the schema and a fake that does nothing.

``Library`` + ``infer_schema`` instead of the ``custom_op`` decorator: per call the decorator costs 41 us and this form
3.5 us (two-tensor no-op, torch 2.13, CPU).

Eager calls run the same function that an op runs, without the dispatcher between; ``traced()`` says when a call must
appear as an op instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..private import dispatch_modes


@functools.cache
def _library(namespace: str) -> torch.library.Library:
    return torch.library.Library(namespace, "FRAGMENT")


def register(
    name: str, implementation: Callable[..., None], mutates_args: Sequence[str], *, namespace: str = "gdn"
) -> Callable[..., None]:
    """Register ``implementation`` as ``torch.ops.<namespace>.<name>`` for every device and return the op."""
    schema = torch.library.infer_schema(implementation, mutates_args=mutates_args)
    library = _library(namespace)
    library.define(name + schema)
    library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{namespace}::{name}", _no_outputs, lib=library)
    op: Callable[..., None] = getattr(getattr(torch.ops, namespace), name).default
    return op


def _no_outputs(*args: Any, **kwargs: Any) -> None:
    return None


def traced() -> bool:
    """True while torch.compile or torch.export traces, or any torch dispatch mode (fake tensors, make_fx) is on."""
    # Not is_compiling(), which also asks for scripting: tracing without Dynamo goes through dispatch modes.
    return torch.compiler.is_dynamo_compiling() or dispatch_modes() > 0
