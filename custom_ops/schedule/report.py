"""The table of `python -m custom_ops.schedule`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from custom_ops.schedule.model import STATEMENT, Row

_MARKS = {"case": "", "schedule": "≤", "least": "≥"}
"""What is known of the bytes that a kernel moves: the number, a bound above, a bound below."""
_COLUMNS = (
    ("bundles", lambda row: f"{row.bundles:,}"),
    ("by bundles µs", lambda row: f"{row.bundle_time:.2f}"),
    ("HBM MB", lambda row: f"{row.hbm_bytes / 1e6:.1f}{_MARKS[row.hbm_bytes_from]}"),
    ("by bytes µs", lambda row: f"{row.hbm_time:.2f}"),
    ("modelled µs", lambda row: f"{row.time:.2f}"),
    ("byte bound µs", lambda row: f"{row.byte_bound:.2f}"),
    ("MXU bound µs", lambda row: f"{row.matrix_bound:.2f}"),
    ("× byte bound", lambda row: f"{row.over_byte_bound:.2f}"),
    ("spills", lambda row: f"{row.spills_in_loops}"),
    ("VMEM MiB", lambda row: f"{row.vmem_bytes / 2**20:.1f}"),
    ("XLA cycles", lambda row: f"{row.xla_cycles:,}"),
)


def table(rows: Sequence[Row]) -> str:
    """Cases under each other, the loops of each kernel below its case."""
    cells = [[f"{row.case} [{row.implementation}]", *(text(row) for _, text in _COLUMNS)] for row in rows]
    header = ["case", *(name for name, _ in _COLUMNS)]
    widths = [max(len(line[column]) for line in [header, *cells]) for column in range(len(header))]
    lines = [_line(header, widths)]
    operation = None
    for row, line in zip(rows, cells, strict=True):
        if row.operation != operation:
            operation = row.operation
            lines.append(f"{operation}")
        lines += [_line(line, widths), *_loop_lines(row)]
    notes = [
        "HBM: as counted for the case; ≤ the schedule's DMAs if no condition ever holds one back; ≥ the least that has to "
        "move, where sizes are known only when the kernel runs.",
        "spills: vector registers stored and loaded inside loops. XLA cycles: its own estimate for the rest of the program.",
    ]
    return "\n".join([*lines, "", STATEMENT, *notes])


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = cells
    return "  ".join([first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))])


def _loop_lines(row: Row) -> Iterator[str]:
    for kernel in row.kernels:
        yield f"    {kernel['name']}"
        for loop in kernel["loops"]:
            what = "loop body" if loop["depth"] else "outside loops"
            unit, part = loop["busiest_unit"] or ("", 0)
            spills = f", {loop['vector_spills']} vector spills" if loop["vector_spills"] else ""
            spills += f", {loop['scalar_spills']} scalar spills" if loop["scalar_spills"] else ""
            fill = f" (+{loop['pipeline_iterations']} to fill and drain)" if loop["pipeline_iterations"] else ""
            indent = "  " * (loop["depth"] + 3)
            yield (
                f"{indent}{what}: {loop['bundles']:,} bundles × {loop['times']:,}{fill}, "
                f"{unit} busy {part:.0%}{spills}"
            )
