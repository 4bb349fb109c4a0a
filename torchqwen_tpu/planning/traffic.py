"""Bytes that an instruction moves between HBM and the core, and a key under which equal programs meet."""

from __future__ import annotations

import functools
import hashlib
import re

from torchqwen_tpu.planning.hlo import Computation, Instruction, Module

FREE = frozenset({
    "parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "partition-id", "replica-id",
    "opt-barrier", "domain", "add-dependency",
})  # fmt: skip
"""Instructions that run nothing."""
_VIEWS = ("bitcast", "reshape", "copy", "transpose", "get-tuple-element")
"""Inside a fusion these move nothing by themselves."""
_SLICES = ("dynamic-slice", "slice", "gather")
_UNLIKE = re.compile(r", metadata=\{[^}]*\}|, backend_config=.*|(?:calls|to_apply)=%[\w.\-<>]+")
"""What equal programs may differ in."""
_NAMES = re.compile(r"%[\w.\-<>]+")


def hbm_bytes(module: Module, computation: Computation, instruction: Instruction) -> int:
    """What the instruction reads and writes in HBM.

    Of an operand that a fusion only slices or gathers from, the slices count; of one that it updates in place, the update.
    A custom call is taken to move its operands and results once, those that alias only once in all.
    """
    if instruction.opcode in FREE:
        return 0
    operands = [computation.by_name[name] for name in instruction.operands if name in computation.by_name]
    if instruction.opcode == "fusion":
        return _fusion_bytes(module, module.computations[instruction.callee("calls")], operands, instruction)
    if instruction.opcode in _SLICES:
        return 2 * _in_hbm(instruction) if _in_hbm(operands[0]) else _in_hbm(instruction)
    if instruction.opcode == "dynamic-update-slice":
        return _in_hbm(operands[1]) + (_size(operands[1]) if _in_hbm(instruction) else 0)
    if instruction.opcode == "scatter":
        return 2 * sum(_in_hbm(operand) for operand in operands[1:])
    return sum(_in_hbm(operand) for operand in operands) + _in_hbm(instruction)


def _in_hbm(instruction: Instruction) -> int:
    """Scalars, which the scalar core has anyway, do not count."""
    return sum(array.bytes for array in instruction.arrays if array.in_hbm and array.dims)


def _size(instruction: Instruction) -> int:
    return sum(array.bytes for array in instruction.arrays)


def _fusion_bytes(module: Module, fused: Computation, operands: list[Instruction], fusion: Instruction) -> int:
    total = 0
    for parameter, operand in zip(fused.parameters, operands, strict=False):
        if _in_hbm(operand):
            total += min(_read(module, fused, parameter), _in_hbm(operand))
    return total + _written(module, fused, fusion)


def _read(module: Module, fused: Computation, source: Instruction) -> int:
    """Bytes of `source`, a parameter or a view of one, that a fused computation reads."""
    whole, total = _size(source), 0
    for user in fused.users[source.name]:
        if user.opcode in _VIEWS:
            total += _read(module, fused, user)
        elif user.opcode in _SLICES and user.operands[0] == source.name:
            total += _size(user)
        elif user.opcode == "dynamic-update-slice" and user.operands[0] == source.name:
            continue
        elif user.opcode == "scatter" and user.operands[0] == source.name:
            total += _size(fused.by_name[user.operands[-1]])
        elif user.opcode == "fusion":
            inner = module.computations[user.callee("calls")]
            for place, name in enumerate(user.operands):
                if name == source.name and _is_view(inner, inner.parameters[place]):
                    total += _read(module, fused, user)
                elif name == source.name:
                    total += _read(module, inner, inner.parameters[place])
        else:
            return whole
    return min(total, whole)


def _is_view(fused: Computation, parameter: Instruction) -> bool:
    """Whether a fused computation only gives its parameter another shape or layout."""
    part = fused.root
    while part.opcode in _VIEWS:
        part = fused.by_name[part.operands[0]]
    return part.name == parameter.name


def _written(module: Module, fused: Computation, fusion: Instruction) -> int:
    root = fused.root
    parts = [fused.by_name[name] for name in root.operands] if root.opcode == "tuple" else [root]
    if len(parts) != len(fusion.arrays):
        return _in_hbm(fusion)
    pairs = zip(parts, fusion.arrays, strict=True)
    return sum(_updated(module, fused, part, array.bytes) for part, array in pairs if array.in_hbm)


def _updated(module: Module, fused: Computation, part: Instruction, whole: int) -> int:
    """Bytes written for one result: the update of an update in place, else all of it."""
    while part.opcode in ("bitcast", "reshape") and part.operands:
        part = fused.by_name[part.operands[0]]
    if part.opcode == "dynamic-update-slice":
        return _size(fused.by_name[part.operands[1]])
    if part.opcode == "scatter":
        return _size(fused.by_name[part.operands[-1]])
    if part.opcode == "fusion" and part.shape.count("[") == 1:
        inner = module.computations[part.callee("calls")]
        return _updated(module, inner, inner.root, whole)
    return whole


class ProgramKeys:
    """Keys of instructions: XLA compiles instructions that are equal but for names once, and dumps one schedule for all."""

    def __init__(self, module: Module):
        self._module = module
        self._digest = functools.cache(self._digest_of)

    def key(self, computation: Computation, instruction: Instruction) -> str:
        shapes = [computation.by_name[name].shape for name in instruction.operands if name in computation.by_name]
        called = [self._digest(name) for _, name in instruction.called]
        configuration = instruction.attribute(r'("window_config":\{.*?\}),"') or ""
        return "|".join([instruction.opcode, instruction.shape, *shapes, *called, configuration])

    def _digest_of(self, name: str) -> str:
        lines, numbers = [], {}

        def numbered(match: re.Match) -> str:
            return f"%{numbers.setdefault(match[0], len(numbers))}"

        for instruction in self._module.computations[name].instructions:
            called = " ".join(self._digest(inner) for _, inner in instruction.called)
            attributes = _UNLIKE.sub("", instruction.attributes)
            named = f"%{instruction.name} = {instruction.shape} {instruction.text} {attributes}"
            lines.append(_NAMES.sub(numbered, named) + called)
        return hashlib.sha1("\n".join(lines).encode()).hexdigest()[:16]
