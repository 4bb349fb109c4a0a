"""A scheduled HLO module as data: computations, instructions in the order of the schedule, shapes with their layouts."""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass, field

BITS = {
    "pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "s32": 32, "u32": 32, "s64": 64, "u64": 64,
    "bf16": 16, "f16": 16, "f32": 32, "f64": 64, "f8e4m3fn": 8, "f8e5m2": 8, "f8e4m3b11fnuz": 8, "c64": 64,
}  # fmt: skip
"""Bits of an element by HLO's name of the type; what is not here (tokens, opaque) takes no memory."""
_ARRAY = re.compile(r"(\w+)\[([\d,<=]*)\](?:\{([\d,]*)(?::((?:\([^)]*\)|[A-Z]\w*|\*)*))?\})?")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-<>]+) \(.*\{$")
_NAME = re.compile(r"^\s+(ROOT )?%([\w.\-<>]+) = ")
_OPERAND = re.compile(r"%([\w.\-<>]+)")
_CALLED = re.compile(r"(calls|to_apply|body|condition|true_computation|false_computation)=%([\w.\-<>]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_CONSTANT = re.compile(r"constant\((-?\d+)\)")
_OPERATION = re.compile(r"jit\((\w+)\)")
_CYCLES = re.compile(r'"estimated_cycles":"(\d{1,15})"')


@dataclass(frozen=True)
class Array:
    """One array of a shape; `bytes` with the padding of its tiles; `in_hbm` is false for what lies in VMEM or SMEM."""

    dtype: str
    dims: tuple[int, ...]
    bytes: int
    in_hbm: bool


@dataclass
class Instruction:
    """One line of a computation.

    estimated_cycles: XLA's own estimate, None where it has none.
    called: (role, computation), e.g. ('body', 'region_1').
    """

    name: str
    opcode: str
    shape: str
    operands: tuple[str, ...]
    attributes: str
    text: str
    root: bool = False

    @functools.cached_property
    def arrays(self) -> tuple[Array, ...]:
        return arrays_of(self.shape)

    @functools.cached_property
    def called(self) -> tuple[tuple[str, str], ...]:
        found = [(role, name) for role, name in _CALLED.findall(self.attributes)]
        if branches := _BRANCHES.search(self.attributes):
            found += [("branch", name) for name in _OPERAND.findall(branches[1])]
        return tuple(found)

    def callee(self, role: str) -> str | None:
        return next((name for found, name in self.called if found == role), None)

    def attribute(self, pattern: str) -> str | None:
        match = re.search(pattern, self.attributes)
        return match[1] if match else None

    @functools.cached_property
    def op_name(self) -> str:
        """The operation that the instruction comes from, as PyTorch/XLA and JAX name it."""
        return self.attribute(r'op_name="([^"]*)"') or ""

    @functools.cached_property
    def operation(self) -> str | None:
        """The operation of ours that the instruction belongs to, by the outermost function of JAX in its name."""
        match = _OPERATION.search(self.op_name)
        return match[1] if match else None

    @property
    def target(self) -> str | None:
        """Of a custom call."""
        return self.attribute(r'custom_call_target="([^"]*)"')

    @property
    def estimated_cycles(self) -> int | None:
        match = _CYCLES.search(self.attributes)
        return int(match[1]) if match else None


@dataclass
class Computation:
    name: str
    instructions: list[Instruction] = field(default_factory=list)

    @functools.cached_property
    def by_name(self) -> dict[str, Instruction]:
        return {instruction.name: instruction for instruction in self.instructions}

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        users: dict[str, list[Instruction]] = {instruction.name: [] for instruction in self.instructions}
        for instruction in self.instructions:
            for operand in dict.fromkeys(instruction.operands):
                users.setdefault(operand, []).append(instruction)
        return users

    @property
    def root(self) -> Instruction:
        return next(instruction for instruction in reversed(self.instructions) if instruction.root)

    @functools.cached_property
    def parameters(self) -> list[Instruction]:
        """In the order of their numbers."""
        found = [instruction for instruction in self.instructions if instruction.opcode == "parameter"]
        return sorted(found, key=lambda instruction: int(re.search(r"parameter\((\d+)\)", instruction.text)[1]))


@dataclass
class Module:
    computations: dict[str, Computation]
    entry: Computation

    def runs_kernel(self, name: str) -> bool:
        """Whether a Pallas kernel with a name that starts so is among the instructions."""
        return any(
            instruction.target == "tpu_custom_call" and instruction.name.startswith(name)
            for computation in self.computations.values() for instruction in computation.instructions
        )  # fmt: skip


def parse(text: str) -> Module:
    """A module from its text, as `HloModule.to_string()` of a compiled executable gives it.

    Raises:
        ValueError: there is no entry computation.
    """
    computations, entry, current = {}, None, None
    for line in text.splitlines():
        if match := _HEAD.match(line):
            current = computations[match[2]] = Computation(match[2])
            entry = current if match[1] else entry
        elif current is not None and (match := _NAME.match(line)):
            current.instructions.append(_instruction(line, match))
    if entry is None:
        raise ValueError("the HLO text has no entry computation")
    return Module(computations, entry)


def _instruction(line: str, match: re.Match) -> Instruction:
    rest = line[match.end() :]
    end = _balanced(rest, 0) if rest.startswith("(") else rest.index(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    opcode, _, _ = rest.partition("(")
    end = _balanced(rest, len(opcode))
    operands = tuple(_OPERAND.findall(rest[len(opcode) : end]))
    return Instruction(match[2], opcode, shape, operands, rest[end:], rest[:end], bool(match[1]))


def _balanced(text: str, start: int) -> int:
    """Where the parenthesis that opens at `start` has closed."""
    depth = 0
    for position in range(start, len(text)):
        if text[position] == "(":
            depth += 1
        elif text[position] == ")":
            depth -= 1
            if depth == 0:
                return position + 1
    raise ValueError(f"unbalanced parentheses in HLO: {text[start : start + 80]}")


@functools.lru_cache(maxsize=65536)
def arrays_of(shape: str) -> tuple[Array, ...]:
    """All arrays in a shape, tuples flattened."""
    return tuple(_array(*match.groups()) for match in _ARRAY.finditer(shape) if match[1] in BITS)


def _array(dtype: str, dims: str, order: str | None, layout: str | None) -> Array:
    sizes = tuple(int(size.lstrip("<=")) for size in dims.split(",") if size)
    space = re.search(r"S\((\d+)\)", layout or "")
    padded = _padded(sizes, order, layout)
    return Array(dtype, sizes, padded * BITS[dtype] // 8, space is None or space[1] == "0")


def _padded(sizes: tuple[int, ...], order: str | None, layout: str | None) -> int:
    """Elements with the padding of the first (outermost) tile."""
    tile = re.search(r"T\(([\d,]*)\)", layout or "")
    if not tile or not tile[1] or not sizes:
        return math.prod(sizes)
    minor_first = [sizes[int(axis)] for axis in order.split(",")] if order else list(reversed(sizes))
    tiles = [int(size) for size in tile[1].split(",")][::-1]
    # A vector is padded to its tile only beyond what one granule of memory holds: count it as it is.
    if len(minor_first) == 1:
        return minor_first[0]
    for axis, size in enumerate(tiles[: len(minor_first)]):
        minor_first[axis] = -(-minor_first[axis] // size) * size
    return math.prod(minor_first)


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """How often a while loop runs, where its text tells: what the compiler noted, or a condition that compares a counter
    from zero with a constant – in the condition, or carried from the loop's start. None for a bound that is data."""
    if noted := loop.attribute(r'"known_trip_count":\{"n":"(\d+)"'):
        return int(noted)
    condition = module.computations[loop.callee("condition")]
    bounds = []
    for instruction in condition.instructions:
        if instruction.opcode == "compare":
            for operand in instruction.operands:
                if (value := _integer(module, condition, operand, computation, loop)) is not None:
                    bounds.append(value)
        elif instruction.opcode == "fusion":
            inner = module.computations[instruction.callee("calls")]
            bounds += [int(match[1]) for entry in inner.instructions if (match := _CONSTANT.match(entry.text))]
            for operand in instruction.operands:
                if (value := _integer(module, condition, operand, computation, loop)) is not None:
                    bounds.append(value)
    bounds = [value for value in bounds if value > 0]
    return max(bounds, default=None)


def _integer(module: Module, condition: Computation, name: str, around: Computation, loop: Instruction) -> int | None:
    """The value of an integer in a loop's condition: a constant there, or one that the loop carries and never changes."""
    instruction = _origin(condition, name)
    if instruction is not None and instruction.opcode == "get-tuple-element":
        index = int(instruction.attribute(r"index=(\d+)"))
        carried = around.by_name.get(loop.operands[0])
        if carried is None or carried.opcode != "tuple" or _changes(module.computations[loop.callee("body")], index):
            return None
        instruction = _origin(around, carried.operands[index])
    match = _CONSTANT.match(instruction.text) if instruction is not None else None
    return int(match[1]) if match else None


def _origin(computation: Computation, name: str) -> Instruction | None:
    """What an instruction is a copy or a view of."""
    instruction = computation.by_name.get(name)
    while instruction is not None and instruction.opcode in ("copy", "bitcast", "reshape", "convert"):
        instruction = computation.by_name.get(instruction.operands[0])
    return instruction


def _changes(body: Computation, index: int) -> bool:
    """Whether a loop's body gives another value to a place of its carry."""
    root = body.root
    if root.opcode != "tuple":
        return True
    element = body.by_name.get(root.operands[index])
    return not (
        element is not None
        and element.opcode == "get-tuple-element"
        and element.attribute(r"index=(\d+)") == str(index)
        and body.by_name[element.operands[0]].opcode == "parameter"
    )
