"""Kernels at the shapes that count. A folder of an operation declares its own in `schedule_cases.py`: `CASES`, and where their
figures make more than a line each a function `report`, from the measured rows to a text."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax

import custom_ops
from custom_ops.schedule.bundles import Loop


@dataclass(frozen=True)
class Program:
    """What is compiled: a function of one core's arrays, and those of them that it may overwrite."""

    function: Callable
    arguments: tuple[jax.ShapeDtypeStruct, ...]
    donated: tuple[int, ...] = ()


@dataclass(frozen=True)
class Case:
    """One kernel at one set of shapes.

    Args:
        name: what runs, e.g. 'decode of 8, BF16 state'; equal for implementations that are compared.
        implementation: 'pallas_tpu', or the library that the kernel is from.
        build: makes the program. It imports the kernel, so that a list of cases needs no kernel.
        kernel: how the kernel's name starts in the compiled HLO; kernels that match are added up.
        hbm_bytes: the least that has to move: states and rows, each read or written once.
        matrix_flops: the operation's matrix work, two for a multiplication and addition.
        trips: how often a loop of the kernel runs, where its exit test does not tell or it is not entered at all: see
            `custom_ops.schedule.bundles.read_schedule`. It takes the kernel's name and the loop.
        moved_bytes: what the kernel moves, where that is known better than from the schedule, which counts every DMA as
            if no condition ever held it back.
        kernel_bytes: the same by kernel, for cases of several; None for one whose schedule tells.
        requires: package that has to be installed, or the case is left out.
    """

    name: str
    implementation: str
    build: Callable[[], Program]
    kernel: str
    hbm_bytes: int
    matrix_flops: int
    trips: Callable[[str, Loop], float | None] = lambda kernel, loop: None  # noqa: E731
    moved_bytes: int | None = None
    kernel_bytes: Callable[[str], float | None] = lambda kernel: None  # noqa: E731
    requires: str | None = None

    @property
    def available(self) -> bool:
        return self.requires is None or importlib.util.find_spec(self.requires) is not None


def operations() -> list[str]:
    """Operations that declare cases."""
    folders = [module.name for module in pkgutil.iter_modules(custom_ops.__path__) if module.ispkg]
    return [name for name in folders if importlib.util.find_spec(f"custom_ops.{name}.schedule_cases")]


def module_of(operation: str) -> str:
    """The module with the cases of an operation.

    Raises:
        ValueError: no such operation, or it declares none.
    """
    if operation not in operations():
        raise ValueError(f"no operation '{operation}' with kernels to schedule; there are: {', '.join(operations())}")
    return f"custom_ops.{operation}.schedule_cases"


def cases_in(module: str) -> list[Case]:
    """The cases that a module declares."""
    return importlib.import_module(module).CASES


def report_of(module: str, rows: Sequence) -> str | None:
    """What a module says of its measured rows, where it says anything."""
    function = getattr(importlib.import_module(module), "report", None)
    return function(rows) if function and rows else None
