"""What an instruction is counted under: a kernel, an operation of ours, or a product with a weight."""

from __future__ import annotations

from torchqwen_tpu.planning.compile import Argument
from torchqwen_tpu.planning.hlo import Computation, Instruction, Module

_LAYOUT = ("copy", "transpose", "reshape", "concatenate", "slice", "dynamic-slice", "dynamic-update-slice", "pad")
_MOVES = ("sort", "gather", "scatter")
_PRODUCTS = ("dot", "convolution")


class Classes:
    """Classes of one graph's instructions; products are called by the weight whose shape an operand has."""

    def __init__(self, arguments: tuple[Argument, ...]):
        self._weights: dict[tuple[int, ...], str] = {}
        for argument in arguments:
            if argument.part.endswith(("weight", "proj")) and len(argument.shape) >= 2:
                self._weights.setdefault(argument.shape[-2:], _short(argument.part))

    def __call__(self, module: Module, computation: Computation, instruction: Instruction) -> str:
        operation = instruction.operation
        if instruction.opcode == "custom-call" and instruction.target == "tpu_custom_call":
            return f"kernel {instruction.name.rpartition('.')[0] or instruction.name}"
        opcodes = {instruction.opcode}
        products = []
        for inner in _within(module, instruction):
            opcodes.add(inner[1].opcode)
            if inner[1].opcode in _PRODUCTS:
                products.append(inner)
        if operation:
            what = "products" if products else "sort, gather, scatter" if opcodes & set(_MOVES) else "rest"
            return f"{operation}: {what}"
        if products:
            return f"product {self._weight(*products[0])}"
        if opcodes & set(_MOVES):
            return "sort, gather, scatter"
        if instruction.opcode in _LAYOUT or opcodes <= {*_LAYOUT, "fusion", "parameter", "constant", "bitcast", "tuple"}:
            return "copies and layouts"
        return "elementwise and norms"

    def _weight(self, computation: Computation, product: Instruction) -> str:
        for name in product.operands:
            for array in computation.by_name[name].arrays:
                if array.dims[-2:] in self._weights:
                    return self._weights[array.dims[-2:]]
        return "of activations"


def _within(module: Module, instruction: Instruction):
    """(computation, instruction) of all that a fusion holds."""
    name = instruction.callee("calls") if instruction.opcode == "fusion" else None
    if name is None:
        return
    computation = module.computations[name]
    for inner in computation.instructions:
        yield computation, inner
        yield from _within(module, inner)


def _short(part: str) -> str:
    return ".".join(word for word in part.removesuffix(".weight").split(".")[-2:] if not word[0].isdigit())
