"""From a request to a plan: layouts traced and compiled, their schedules played."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import PretrainedConfig

from custom_ops.cost_model import CHIPS, Chip
from custom_ops.tpu_compiler import topology
from torchqwen_tpu.auto import _CLASSES
from torchqwen_tpu.config import LAYOUTS
from torchqwen_tpu.models.causal_lm import check_divisible
from torchqwen_tpu.parallel.mesh import DeviceMesh
from torchqwen_tpu.planning.classes import Classes
from torchqwen_tpu.planning.compile import CompiledStep, compile_step
from torchqwen_tpu.checkpoint.resolve import read_config
from torchqwen_tpu.planning.config import find_config
from torchqwen_tpu.planning.hlo import Module, parse
from torchqwen_tpu.planning.kernels import Kernels
from torchqwen_tpu.planning.load import Expectations, Load
from torchqwen_tpu.planning.memory import memory_of, part_of
from torchqwen_tpu.planning.outcome import Collective, Cost
from torchqwen_tpu.planning.programs import Programs
from torchqwen_tpu.planning.request import KV_DTYPES, PlanRequest, graphs
from torchqwen_tpu.planning.result import LayoutPlan, Plan, Step
from torchqwen_tpu.planning.roofline import Roofline, roofline
from torchqwen_tpu.planning.simulate import Player

_MATRIX = {"bf16": "bfloat16", "fp8": "float8_e4m3fn"}
"""Dtype of most products by that of the weights."""
_EXAMPLES = ("2x2x1", "2x4", "2x4", "2x2x1")
"""Sizes that the compiler takes, for each of CHIPS."""
Progress = Callable[[str], None]


def plan(request: PlanRequest, progress: Progress = lambda what: None) -> Plan:
    """Compile the model's steps for the topology with the TPU compiler, without a TPU, and model their times.

    Args:
        progress: told what is being done.

    Raises:
        FileNotFoundError, ValueError: no such model or topology, another family, a layout that does not divide.
        TpuCompilerMissing: libtpu is not installed.
    """
    devices = _devices(request.topology)
    chip = _chip(devices[0].device_kind)
    chips = len(devices) // chip.cores
    file = find_config(request.model)
    config = read_config(file)
    text = config.get_text_config()
    layouts = [name for name in LAYOUTS if request.layout in (name, "auto")]
    plans = []
    for name in layouts:
        mesh = DeviceMesh(chips, chip.cores, name)
        try:
            check_divisible(text, mesh)
        except ValueError as error:
            if request.layout != "auto":
                raise
            plans.append(LayoutPlan(name, mesh.ranks, error=str(error)))
            continue
        if name != "dp" and len(devices) == 1:
            continue
        plans.append(_plan_layout(request, file, config, chip, mesh, progress))
    return Plan(request, chips, chip.cores, count_parameters(config), tuple(plans))


def count_parameters(config: PretrainedConfig) -> dict[str, int]:
    """Parameters of the whole model by part."""
    with torch.device("meta"):
        model = _CLASSES[type(config)](config)
    counts: dict[str, int] = defaultdict(int)
    for name, parameter in model.named_parameters():
        counts[part_of(name)] += parameter.numel()
    return dict(counts)


def _devices(name: str) -> list:
    try:
        return topology(name).devices
    except ValueError as error:
        known = ", ".join(f"{chip.name}:{example}" for chip, example in zip(CHIPS.values(), _EXAMPLES, strict=True))
        raise ValueError(f"{error}; a topology is a chip and how many lie along each axis, such as {known}") from error


def _chip(device_kind: str) -> Chip:
    if device_kind not in CHIPS:
        raise ValueError(f"the cost model does not know {device_kind}; it knows {', '.join(CHIPS)}")
    return CHIPS[device_kind]


def _torus(name: str) -> tuple[int, ...]:
    """Chips along each axis, of a topology's name."""
    return tuple(int(size) for size in re.findall(r"\d+", name.partition(":")[2]))


def _plan_layout(request, file: Path, config, chip: Chip, mesh: DeviceMesh, progress: Progress) -> LayoutPlan:
    compiled: dict[str, CompiledStep] = {}
    for name, graph in graphs(request, mesh.layout, mesh.chips, mesh.cores, mesh.ranks).items():
        progress(f"layout {mesh.layout}: compiling the {name} step for {request.topology}")
        compiled[name] = compile_step(file, graph)
        if not compiled[name].fits:
            return LayoutPlan(mesh.layout, mesh.ranks, memory_of([compiled[name]], chip, mesh.ranks, request.total_len))
    text = config.get_text_config()
    memory = memory_of(list(compiled.values()), chip, mesh.ranks, request.total_len)
    parameters = count_parameters(config)
    steps = {}
    modules = {name: parse(step.hlo) for name, step in compiled.items()}
    for kind, (graph, load) in _loads(request, mesh, compiled).items():
        progress(f"layout {mesh.layout}: modelling {kind}")
        expected, kernels = _expectations(request, text, compiled[graph], load, mesh)
        bound = roofline(expected, memory, parameters, chip, _MATRIX[request.dtype], mesh.devices)
        steps[kind] = _step(kind, request, compiled[graph], modules[graph], chip, expected, kernels, bound)
    throughput, first, burst, output = _request_times(request, mesh, steps)
    return LayoutPlan(
        mesh.layout, mesh.ranks, memory, steps, first, burst, output, throughput,
        compile_seconds=sum(step.seconds for step in compiled.values()),
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


def _expectations(request: PlanRequest, text, step: CompiledStep, load: Load, mesh: DeviceMesh) -> tuple[Expectations, Kernels]:
    slots = step.slots
    rows = step.graph.tokens or slots
    state_bytes = 2 if request.state_dtype == "bfloat16" else 4
    kernels = Kernels(
        text, load, rows, request.dtype == "fp8", mesh.shards("heads"), state_bytes, mesh.chips,
        request.page_size, KV_DTYPES[request.kv_dtype],
    )  # fmt: skip
    passes = kernels.experts.passes if kernels.experts and kernels.experts.pallas else None
    return Expectations(text, load, rows, slots, request.page_size, passes), kernels


def _step(
    kind: str, request: PlanRequest, step: CompiledStep, module: Module, chip: Chip, expected: Expectations, kernels: Kernels,
    bound: Roofline,
) -> Step:  # fmt: skip
    programs = Programs(module, step.schedules, kernels.turns, kernels.bytes)
    classes = Classes(step.arguments)
    player = Player(module, programs, chip, _torus(request.topology), classes, expected.turns, kernels.seconds)
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
