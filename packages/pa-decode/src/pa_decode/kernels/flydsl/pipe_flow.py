"""Branches and loops over nested values, for kernels whose parts are plain functions.

A tree is a dict, list or tuple of trees, or a value of FlyDSL. What a branch does not change, and what it changes in
place, stays in its registers: the side that is not taken must compute nothing, or the compiler copies.
"""

from __future__ import annotations

import flydsl.expr as fx
from flydsl._mlir import ir
from flydsl._mlir.dialects import llvm, scf
from flydsl.expr import rocdl
from flydsl.expr.typing import T
from flydsl.expr.typing import Vector as Vec


def leaves(tree):
    """The values of a tree, in order."""
    if isinstance(tree, dict):
        return [leaf for part in tree.values() for leaf in leaves(part)]
    if isinstance(tree, list | tuple):
        return [leaf for part in tree for leaf in leaves(part)]
    return [tree]


def rebuilt(tree, values):
    """A tree like ``tree`` of other IR values, an iterator."""
    if isinstance(tree, dict):
        return {name: rebuilt(part, values) for name, part in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(rebuilt(part, values) for part in tree)
    value = next(values)
    return Vec(value, tree.shape, tree.dtype) if isinstance(tree, Vec) else type(tree)(value)


def _raw(tree):
    return [leaf.ir_value() for leaf in leaves(tree)]


def when(condition, tree, change):
    """``change(tree)`` if ``condition`` (a Boolean, the same in all lanes) else ``tree``."""
    raw = _raw(tree)
    branch = scf.IfOp(condition.ir_value(), [value.type for value in raw], has_else=True)
    with ir.InsertionPoint(branch.then_block):
        scf.YieldOp(_raw(change(tree)))
    with ir.InsertionPoint(branch.else_block):
        scf.YieldOp(raw)
    return rebuilt(tree, iter(branch.results))


def only_when(condition, act):
    """``act()`` if ``condition``, the same in all lanes."""
    branch = scf.IfOp(condition.ir_value(), [])
    with ir.InsertionPoint(branch.then_block):
        act()
        scf.YieldOp([])


def repeat(count, tree, step):
    """``step`` applied ``count`` (Int32, not negative) times; the loop is not unrolled."""
    count = opaque_scalar(count)
    loop = scf.ForOp(fx.Int32(0).ir_value(), count.ir_value(), fx.Int32(1).ir_value(), _raw(tree))
    loop.attributes["loop_annotation"] = ir.Attribute.parse(
        "#llvm.loop_annotation<unroll = <count = 1 : i32, disable = true>>"
    )
    with ir.InsertionPoint(loop.body):
        scf.YieldOp(_raw(step(rebuilt(tree, iter(loop.inner_iter_args)))))
    return rebuilt(tree, iter(loop.results))


def any_lane(*conditions):
    """Whether one of ``conditions`` holds in some lane, as a scalar that the compiler takes for one."""
    first, *rest = (fx.Int64(rocdl.ballot(T.i64, condition)) for condition in conditions)
    for mask in rest:
        first = first | mask
    return fx.Int64(llvm.inline_asm(T.i64, [first.ir_value()], "", "=s,0", has_side_effects=False)) != fx.Int64(0)


def opaque_scalar(value):
    """``opaque`` of an Int32 that is the same in all lanes, in a scalar register.

    For counts whose loops and branches follow branches on them: a compiler that sees how they hang together folds them,
    then takes the whole for divergent and keeps what enters a loop alive beside what the loop carries.
    """
    return fx.Int32(llvm.inline_asm(T.i32, [value.ir_value()], "", "=s,0", has_side_effects=False))


def opaque(value):
    """``value`` (Int32 or Float32) of which the compiler knows nothing: constants added to it stay in the instructions,
    instead of being added once before a loop, into a register each."""
    kind = type(value)
    return kind(llvm.inline_asm(kind.ir_type, [value.ir_value()], "", "=v,0", has_side_effects=False))


def in_accumulators(value):
    """``value`` (a Vec) in accumulation registers, from which matrix products read too. Left to itself the compiler
    keeps there what does not fit elsewhere, and copies it back in every turn of a loop."""
    kind = value.ir_value().type
    moved = llvm.inline_asm(kind, [value.ir_value()], "", "=a,0", has_side_effects=False)
    return Vec(moved, value.shape, value.dtype)
