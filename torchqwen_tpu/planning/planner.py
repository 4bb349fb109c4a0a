"""From a request to a plan: layouts traced and compiled, their schedules played."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable

import torch
from transformers import PretrainedConfig

from torchqwen_tpu.auto import class_of
from torchqwen_tpu.checkpoint.resolve import read_config
from torchqwen_tpu.inputs import limit_of
from torchqwen_tpu.parallel.mesh import DeviceMesh
from torchqwen_tpu.planning.arguments import sizes_of
from torchqwen_tpu.planning.classes import Classes
from torchqwen_tpu.planning.compile import CompiledStep, compile_steps
from torchqwen_tpu.planning.config import find_config
from torchqwen_tpu.planning.hlo import Module, parse
from torchqwen_tpu.planning.kernels import Kernels
from torchqwen_tpu.planning.layouts import AUTO, key_value_copies, meshes, sized_name, with_copies
from torchqwen_tpu.planning.load import Expectations, Load
from torchqwen_tpu.planning.memory import memory_of, part_of
from torchqwen_tpu.planning.outcome import Collective, Cost
from torchqwen_tpu.planning.programs import Programs
from torchqwen_tpu.planning.remedies import remedies
from torchqwen_tpu.planning.request import KV_DTYPES, PlanRequest, graphs
from torchqwen_tpu.planning.result import LayoutPlan, Plan, Step
from torchqwen_tpu.planning.roofline import Roofline, roofline
from torchqwen_tpu.planning.simulate import Player
from torchqwen_tpu.planning.topologies import Topology, find_topology

_MATRIX = {"bf16": "bfloat16", "fp8": "float8_e4m3fn"}
"""Dtype of most products by that of the weights."""
Progress = Callable[[str], None]


def plan(request: PlanRequest, progress: Progress = lambda what: None) -> Plan:
    """Compile the model's steps for the topology with the TPU compiler, without a TPU, and model their times.

    Args:
        progress: told what is being done.

    Raises:
        FileNotFoundError, ValueError: no such model or topology, another family, a layout that does not divide.
        TpuCompilerMissing: libtpu is not installed.
    """
    where = find_topology(request.topology)
    file = find_config(request.model)
    config = read_config(file)
    drafts = {}
    for mesh in meshes(request.layout, where.chips, where.chip.cores):
        try:
            drafts[mesh] = _draft(request, config, where, mesh)
        except ValueError as error:
            if request.layout != AUTO:
                raise
            drafts[mesh] = LayoutPlan(mesh.layout, sized_name(mesh), mesh.ranks, error=str(error))
    wanted = {
        (mesh, kind): graph
        for mesh, draft in drafts.items() if draft.memory and draft.memory.fits
        for kind, graph in graphs(request, file, mesh, draft.key_value_copies).items()
    }  # fmt: skip
    compiled = compile_steps(
        wanted, lambda key, what: progress(f"{sized_name(key[0])}, {key[1]} step for {request.topology}: {what}")
    )
    parameters, layouts = count_parameters(config), []
    for mesh, draft in drafts.items():
        steps = {kind: step for (of, kind), step in compiled.items() if of == mesh}
        if steps:
            progress(f"{sized_name(mesh)}: modelling")
            draft = _plan_layout(request, config, where, mesh, draft, steps, parameters)
        layouts.append(draft)
    return Plan(request, where.chips, where.chip.cores, len(config.get_text_config().layer_types), parameters, tuple(layouts))


def count_parameters(config: PretrainedConfig) -> dict[str, int]:
    """Parameters of the whole model by part."""
    with torch.device("meta"):
        model = class_of(config)(config)
    counts: dict[str, int] = defaultdict(int)
    for name, parameter in model.named_parameters():
        counts[part_of(name)] += parameter.numel()
    return dict(counts)


def _draft(
    request: PlanRequest, config: PretrainedConfig, where: Topology, mesh: DeviceMesh, steps: tuple[CompiledStep, ...] = ()
) -> LayoutPlan:
    """What is known of a layout's memory, by `steps` where they were compiled; with what would help where it does not fit."""
    copies = key_value_copies(config, mesh)
    own = with_copies(config, copies)
    sizes = sizes_of(own, mesh, request)
    memory = memory_of(sizes, steps, request, where.chip, mesh.ranks, limit_of(config.get_text_config()))
    help_with = () if memory.fits else remedies(request, config, where.chip, mesh, memory)
    notes = [f"planned with every key-value head on {copies} cores, which this library does not load"] if copies > 1 else []
    notes += [step.note for step in steps if step.note][:1]
    return LayoutPlan(mesh.layout, sized_name(mesh), mesh.ranks, copies, memory, remedies=help_with, notes=tuple(notes))


def _plan_layout(
    request: PlanRequest, config: PretrainedConfig, where: Topology, mesh: DeviceMesh, draft: LayoutPlan,
    compiled: dict[str, CompiledStep], parameters: dict[str, int],
) -> LayoutPlan:  # fmt: skip
    layout = _draft(request, config, where, mesh, tuple(compiled.values()))
    if not all(step.fits for step in compiled.values()):
        return layout
    text = with_copies(config, draft.key_value_copies).get_text_config()
    steps = {}
    modules = {name: parse(step.hlo) for name, step in compiled.items()}
    for kind, (graph, load) in _loads(request, mesh, compiled).items():
        expected, kernels = _expectations(request, text, compiled[graph], modules[graph], load, mesh)
        bound = roofline(expected, layout.memory, parameters, where.chip, _MATRIX[request.dtype], mesh.devices)
        steps[kind] = _step(kind, compiled[graph], modules[graph], where, expected, kernels, bound)
    throughput, first, burst, output = _request_times(request, mesh, steps)
    return dataclasses.replace(
        layout, steps=steps, time_to_first_token=first, time_to_first_token_burst=burst, time_per_output_token=output,
        tokens_per_second_chip=throughput, compile_seconds=sum(step.seconds for step in compiled.values()),
        compile_memory=max(step.peak for step in compiled.values()),
    )  # fmt: skip


def _loads(request: PlanRequest, mesh: DeviceMesh, compiled: dict[str, CompiledStep]) -> dict[str, tuple[str, Load]]:
    """Step kinds: their graph and what it holds."""
    rows, chunk = -(-request.concurrency // mesh.ranks), compiled["extend"].graph.tokens
    tokens = min(chunk, rows * request.input_len)
    sequences = max(tokens // request.input_len, 1)
    before = max(request.input_len - tokens, 0) // 2  # the mean over the chunks of a prompt
    common = {"ranks": mesh.ranks, "devices": mesh.devices}
    half = request.input_len + request.output_len // 2
    beside = max(rows - sequences, 0)
    loads = {"prefill": ("extend", Load(0, 0, tokens, before, sequences, **common))}
    if beside:
        loads["mixed"] = ("extend", Load(beside, half, tokens - beside, before, sequences, **common))
    for kind, context in (("start", request.input_len), ("end", request.total_len)):
        loads[f"decode, {kind}"] = ("decode", Load(rows, context, decode_graph=True, **common))
    return loads


def _expectations(
    request: PlanRequest, text, step: CompiledStep, module: Module, load: Load, mesh: DeviceMesh
) -> tuple[Expectations, Kernels]:
    slots = step.slots
    rows = step.graph.tokens or slots
    state_bytes = 2 if request.state_dtype == "bfloat16" else 4
    kernels = Kernels(
        text, load, rows, request.dtype == "fp8", mesh.shards("heads"), state_bytes, mesh.chips,
        request.page_size, KV_DTYPES[request.kv_dtype],
    )  # fmt: skip
    passes = kernels.experts.passes if module.runs_kernel("ragged_moe_experts") else None
    return Expectations(text, load, rows, slots, request.page_size, passes), kernels


def _step(
    kind: str, step: CompiledStep, module: Module, where: Topology, expected: Expectations, kernels: Kernels, bound: Roofline
) -> Step:
    programs = Programs(module, step.schedules, kernels.turns, kernels.bytes)
    classes = Classes(step.arguments)
    player = Player(module, programs, where.chip, where.places, classes, expected.turns, kernels.seconds)
    result = player.play()
    runs = step.graph.decode_steps if step.graph.tokens is None else 1
    return Step(
        kind=kind,
        seconds=result.seconds / runs,
        tokens=expected.load.tokens,
        costs={name: _share(cost, runs) for name, cost in sorted(result.costs.items(), key=lambda item: -item[1].seconds)},
        collectives=tuple(_runs(entry, runs) for entry in result.collectives.values() if entry.devices > 1),
        roofline=bound,
        events=tuple(result.events),
        unknown_loops=tuple(sorted(result.unknown_loops)),
    )


def _share(cost: Cost, runs: int) -> Cost:
    values = {name: value if isinstance(value, bool) else value / runs for name, value in vars(cost).items()}
    return Cost(**values)


def _runs(entry: Collective, runs: int) -> Collective:
    return Collective(**{**vars(entry), "runs": entry.runs / runs})


def _request_times(request: PlanRequest, mesh: DeviceMesh, steps: dict[str, Step]):
    """Tokens a second and chip, time to the first token (one prompt, and all at once on average), and per output token.

    All requests of a rank are prefilled in chunks; beside them, the others decode (mixed), or wait (separate).
    """
    rows = -(-request.concurrency // mesh.ranks)
    prefill, decode = steps["prefill"], (steps["decode, start"].seconds + steps["decode, end"].seconds) / 2
    per_rank = prefill.tokens / mesh.ranks
    chunks = rows * request.input_len / per_rank
    total = request.concurrency * (request.input_len + request.output_len)
    separate = chunks * prefill.seconds + request.output_len * decode
    throughput = {"separate": total / separate / mesh.chips, "mixed": total / separate / mesh.chips}
    own = max(request.input_len / per_rank, 1)
    if "mixed" in steps:
        mixed = steps["mixed"]
        beside = rows - max(int(per_rank // request.input_len), 1)
        chunks_mixed = rows * request.input_len / (per_rank - beside)
        rest = max(request.output_len - chunks_mixed * beside / rows, 0)
        together = chunks_mixed * mixed.seconds + rest * decode
        throughput["mixed"] = total / together / mesh.chips
        own *= mixed.seconds
    else:
        own *= prefill.seconds
    burst = (chunks + min(own / prefill.seconds, chunks)) / 2 * prefill.seconds
    return throughput, own, burst, decode
