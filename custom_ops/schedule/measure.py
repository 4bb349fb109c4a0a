"""Compiles a case in a process of its own, because libtpu takes the options of its dump only when it is loaded."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from custom_ops.schedule.bundles import Loop, ScheduleError, read_schedule
from custom_ops.schedule.cases import Case, cases_in
from custom_ops.tpu_compiler import compile_jax, environment_with, topology


class CompileError(RuntimeError):
    """A case did not compile."""


@dataclass(frozen=True)
class Kernel:
    """One compiled kernel: its name in the HLO, its loops and its VMEM."""

    name: str
    program: Loop
    vmem_bytes: int


@dataclass(frozen=True)
class Measurement:
    """What the compiler made of a case.

    xla_cycles: the compiler's own estimate for what XLA does before and after the kernels (casts, copies, padding), which
        the times of the kernels leave out.
    """

    kernels: tuple[Kernel, ...]
    xla_cycles: int


def measure(module: str, case: Case) -> Measurement:
    """Compile a case of a module's CASES for one core of TPU7x and read its schedule.

    All arrays start in HBM: XLA would move small ones to VMEM before the kernel, and what that costs or saves depends on
    the graph around it.

    Raises:
        TpuCompilerMissing: libtpu is not installed.
        CompileError: the compiler refused the case, or compiled no kernel of that name.
        ScheduleError: the schedule lacks a count, see `read_schedule`.
    """
    topology()
    with tempfile.TemporaryDirectory(prefix="schedule-") as folder:
        command = [sys.executable, "-m", "custom_ops.schedule.measure", module, case.implementation, case.name]
        options = (f"--xla_jf_dump_to={folder}", "--xla_jf_dump_llo_text=true", "--xla_msa_enable=false")
        environment = environment_with(*options) | {"PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            reason = "\n".join(done.stderr.strip().splitlines()[-15:])
            raise CompileError(f"{case.name}, {case.implementation}, did not compile:\n{reason}")
        kernels = tuple(_read_kernels(Path(folder), case))
        if not kernels:
            raise CompileError(f"{case.name}, {case.implementation}: no kernel in the HLO is called {case.kernel}*")
        return Measurement(kernels, json.loads(done.stdout.splitlines()[-1]))


def _read_kernels(folder: Path, case: Case) -> Iterator[Kernel]:
    vmem = _vmem_by_kernel(folder)
    for file in sorted(folder.glob("*-final_bundles.txt")):
        match = re.fullmatch(r"\d+-(.+)-\d+-final_bundles\.txt", file.name)
        if match and match[1].startswith(case.kernel):
            name = match[1]
            utilization = next(folder.glob(f"*-{name}-*-final_hlo-static-per-bundle-utilization.txt"))
            try:
                program = read_schedule(file.read_text(), utilization.read_text(), functools.partial(case.trips, name))
            except ScheduleError as error:
                raise ScheduleError(f"{case.name}, {case.implementation}, {name}: {error}") from error
            yield Kernel(name, program, vmem.get(name, 0))


def _vmem_by_kernel(folder: Path) -> dict[str, int]:
    """Bytes of VMEM by instruction, from the data inside the compiler's report."""
    report = next(folder.glob("*vmem_report.html")).read_text()
    start = report.index("{", report.index("const DATA"))
    data, _ = json.JSONDecoder().raw_decode(report, start)
    return {name: entry["total_size"] for name, entry in data["hlo_breakdowns"].items()}


def _xla_cycles(hlo: str, kernel: str) -> int:
    """Estimated cycles of the entry computation's instructions that are no kernel."""
    entry = hlo[hlo.index("\nENTRY ") :].split("\n}", 1)[0]
    lines = [line for line in entry.splitlines() if not re.match(rf"\s*(?:ROOT )?%{re.escape(kernel)}", line)]
    return sum(int(cycles) for line in lines for cycles in re.findall(r'"estimated_cycles":"(\d+)"', line))


def main(module: str, implementation: str, name: str) -> None:
    """The child: compile one case, the dump going where the environment says, and print the cycles of the rest."""
    case = next(case for case in cases_in(module) if (case.implementation, case.name) == (implementation, name))
    program = case.build()
    compiled = compile_jax(program.function, *program.arguments, donated=program.donated)
    print(json.dumps(_xla_cycles(compiled.as_text(), case.kernel)))


if __name__ == "__main__":
    main(*sys.argv[1:])
