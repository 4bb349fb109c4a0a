"""Traces and compiles one graph, in the process that `compile` starts (`python -m torchqwen_tpu.planning.child`)."""

from __future__ import annotations

import dataclasses
import json
import re
import resource
import sys
from pathlib import Path

import torch_xla.runtime as xr

from custom_ops.cost_model import CHIPS
from custom_ops.implementations import IMPLEMENTATIONS
from custom_ops.tpu_compiler import compile_graph, topology
from torchqwen_tpu.checkpoint.resolve import read_config
from torchqwen_tpu.planning.request import Graph
from torchqwen_tpu.planning.trace import trace


def main(folder: str) -> None:
    """Writes hlo and result.json into `folder`."""
    graph = Graph(**json.loads((Path(folder) / "graph.json").read_text()))
    result = Path(folder) / "result.json"
    try:
        answer = _compile(graph, Path(folder) / "hlo")
    except ValueError as error:
        answer = {"error": str(error)}
    result.write_text(json.dumps(answer | {"peak": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}))


def _compile(graph: Graph, hlo: Path) -> dict:
    if graph.devices > 1:
        xr.use_spmd()
    try:
        return _compile_with(graph, hlo, {})
    except Exception as error:  # the compiler's own exception type is not public
        if "Mosaic" not in str(error):
            raise
        xla = {name: "xla" for name, choices in IMPLEMENTATIONS.items() if {"xla", "pallas_tpu"} <= set(choices)}
        reason = " ".join(str(error).split())[:200]
        for file in (hlo.parent / "dump").glob("*"):  # schedules of the graph that was refused, whose names come again
            file.unlink()
        note = f"planned with RuntimeConfig(implementations={xla}), as a Pallas kernel does not compile for this chip: {reason}"
        return _compile_with(graph, hlo, xla) | {"note": note}


def _compile_with(graph: Graph, hlo: Path, implementations: dict[str, str]) -> dict:
    traced = trace(read_config(Path(graph.config)), graph, implementations)
    inputs, arguments = traced.inputs.made, traced.inputs.of_a_device()
    given = sum(argument.bytes for argument in arguments)
    memory = {"argument": given, "output": 0, "alias": 0, "temp": 0, "generated_code": 0}
    answer = {"memory": memory, "arguments": [dataclasses.astuple(argument) for argument in arguments], "fits": False}
    try:
        executable = compile_graph(
            traced.outputs, [entry.tensor for entry in inputs], [entry.spec for entry in inputs], traced.mesh,
            donated=traced.donated, topology_name=graph.topology,
        )  # fmt: skip
    except Exception as error:
        if "RESOURCE_EXHAUSTED" not in str(error) or "Mosaic" in str(error):
            raise
        capacity = CHIPS[topology(graph.topology).devices[0].device_kind].hbm_bytes
        memory["temp"] = max(_needed(str(error), given), capacity + 1) - given
        return answer
    hlo.write_text(executable.hlo_modules()[0].to_string())
    stats = executable.get_compiled_memory_stats()
    memory |= {name: getattr(stats, f"{name}_size_in_bytes") for name in memory}
    return answer | {"fits": True}


def _needed(refusal: str, given: int) -> int:
    """Bytes that the compiler would need, by its message: all of them, or those of temporaries alone."""
    if found := re.search(r"Used ([\d.]+)([KMG]) of", refusal):
        return _bytes(*found.groups())
    found = re.search(r"temporaries \(([\d.]+)([KMG])\)", refusal)
    return given + _bytes(*found.groups()) if found else 0


def _bytes(number: str, unit: str) -> int:
    return int(float(number) * 1024 ** ("KMG".index(unit) + 1))


if __name__ == "__main__":
    main(*sys.argv[1:])
