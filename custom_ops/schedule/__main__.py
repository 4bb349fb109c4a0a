"""python -m custom_ops.schedule [--op NAME] [--json]"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys

from custom_ops.schedule.bundles import ScheduleError
from custom_ops.schedule.cases import cases_in, module_of, operations, report_of
from custom_ops.schedule.measure import CompileError, measure
from custom_ops.schedule.model import STATEMENT, Row, row
from custom_ops.schedule.report import table
from custom_ops.tpu_compiler import TpuCompilerMissing


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 1 where a case could not be measured."""
    parser = argparse.ArgumentParser(
        prog="python -m custom_ops.schedule",
        description="Compile the Pallas kernels for one core of TPU7x with the TPU compiler (libtpu, no TPU needed) and "
        "show bundles, spills, memory and the time that follows from them. " + STATEMENT,
    )
    parser.add_argument("--op", metavar="NAME", help=f"one operation only: {', '.join(operations())}")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table; times are in microseconds")
    options = parser.parse_args(arguments)
    try:
        modules = {name: module_of(name) for name in ([options.op] if options.op else operations())}
    except ValueError as error:
        parser.error(str(error))
    rows, failures = _measure_all(modules)
    if options.json:
        print(json.dumps({"model": STATEMENT, "cases": [dataclasses.asdict(row) for row in rows], "failed": failures}))
    elif rows:
        print(table(rows))
        for name, module in modules.items():
            if text := report_of(module, [row for row in rows if row.operation == name]):
                print(f"\n{text}")
    return 1 if failures else 0


def _measure_all(modules: dict[str, str]) -> tuple[list[Row], list[str]]:
    """The figures of all cases, by operation and module, and what went wrong with those that are not among them."""
    rows, failures = [], []
    selected = [(operation, module, case) for operation, module in modules.items() for case in cases_in(module)]
    for number, (operation, module, case) in enumerate(selected, 1):
        label = f"[{number}/{len(selected)}] {operation}, {case.name}, {case.implementation}"
        if not case.available:
            print(f"{label}: left out, {case.requires} is not installed", file=sys.stderr)
            continue
        print(f"{label}: compiling", file=sys.stderr, flush=True)
        try:
            rows.append(row(operation, case, measure(module, case)))
        except TpuCompilerMissing as error:
            print(error, file=sys.stderr)
            return rows, [str(error)]
        except (CompileError, ScheduleError) as error:
            print(error, file=sys.stderr)
            failures.append(str(error))
    return rows, failures


if __name__ == "__main__":
    sys.exit(main())
