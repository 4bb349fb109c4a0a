"""From checkpoint files to parameters on the devices: everything is checked before the first tensor is read."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from tqdm.auto import tqdm
from transformers.utils import logging

from torchqwen_tpu.checkpoint.files import WEIGHT_DTYPES, CheckpointError, CheckpointFiles
from torchqwen_tpu.checkpoint.layout import WeightLayout
from torchqwen_tpu.checkpoint.names import Source, is_carried, parameter_of

logger = logging.get_logger(__name__)

KEEP_FP32 = ("linear_attn.A_log", "linear_attn.norm.weight")
"""Ends of the names of parameters that stay FP32 whatever the model's dtype: they steer the recurrent state."""
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
LISTED = 5
"""How many names an error lists."""


def load_parameters(
    files: CheckpointFiles, model: nn.Module, config, dtype: torch.dtype, place: Callable[[str, torch.Tensor], torch.Tensor]
) -> None:
    """Fill every parameter of `model` (on the meta device) from `files`.

    Args:
        config: the text config.
        dtype: of the parameters, but for those that stay FP32.
        place: puts a parameter of the host on the devices, by its name.

    Raises:
        CheckpointError: a parameter that nothing fills, a tensor that fills nothing, a shape or a dtype that does not fit.
    """
    layout = WeightLayout(config)
    names = [name for name, _ in model.named_parameters()]
    parameters = {}
    for name, value in model.named_parameters():
        parameters |= layout.to_published(name, value)
    plan = match(files, parameters)
    total = sum(files.tensors[source.name].bytes for sources in plan.values() for source in sources)
    with tqdm(
        total=total, desc="Loading weights", unit="B", unit_scale=True, disable=not logging.is_progress_bar_enabled()
    ) as bar:
        for name in names:
            kept = torch.float32 if name.endswith(KEEP_FP32) else dtype
            parts = {}
            for part in layout.parts(name):
                parts[part] = _assemble(files, parameters[part], plan[part], kept)
                bar.update(sum(files.tensors[source.name].bytes for source in plan[part]))
            value = layout.to_device(name, parts)
            _replace(model, name, nn.Parameter(place(name, value.contiguous()), requires_grad=False))


def is_head_tied(files: CheckpointFiles, config) -> bool:
    """Whether the embedding serves as language-model head: as the configuration says, unless the files hold another."""
    head = files.tensors.get(HEAD)
    if head is None:
        return config.tie_word_embeddings or config.get_text_config().tie_word_embeddings
    if not config.get_text_config().tie_word_embeddings:
        return False
    embedding = next((name for name in files.tensors if parameter_of(name)[0] == EMBEDDING), None)
    if embedding is None or torch.equal(files.read(HEAD), files.read(embedding)):
        return True
    logger.warning(
        f"config.json of {files.folder} says tie_word_embeddings, and the files hold an {HEAD} that differs from the "
        "embedding: it is used; set tie_word_embeddings to false to silence this"
    )
    return False


def match(files: CheckpointFiles, parameters: dict[str, torch.Tensor]) -> dict[str, list[Source]]:
    """For every parameter (in its published form), the tensors of the files that fill it.

    Raises:
        CheckpointError: naming what is missing, unexpected, mismatched or filled twice.
    """
    plan: dict[str, list[Source]] = {name: [] for name in parameters}
    unexpected = []
    for name in files.tensors:
        if is_carried(name):
            continue
        parameter, source = parameter_of(name)
        if parameter in plan:
            plan[parameter].append(source)
        elif not (parameter == HEAD and EMBEDDING in plan):  # a copy of tied embeddings
            unexpected.append(name)
    problems = []
    if missing := [name for name, sources in plan.items() if not sources]:
        problems.append(f"no tensor fills {_listed(missing)}")
    if unexpected:
        problems.append(f"no parameter takes {_listed(unexpected)}")
    for name, sources in plan.items():
        problems += _problems(files, name, parameters[name], sources)
    if problems:
        raise CheckpointError(f"{files.folder} does not fit the model: " + "; ".join(problems))
    return plan


def _problems(files: CheckpointFiles, name: str, parameter: torch.Tensor, sources: list[Source]) -> list[str]:
    """What is wrong with the tensors that fill one parameter."""
    problems = []
    for source in sources:
        entry = files.tensors[source.name]
        expected = tuple(parameter[_part(parameter, source)].shape)
        if source.expert is not None and source.expert >= parameter.shape[0]:
            problems.append(f"{source.name} is expert {source.expert} of {parameter.shape[0]}")
        elif entry.shape != expected:
            problems.append(f"{source.name} in {entry.file.name} has shape {list(entry.shape)}, the model {list(expected)}")
        if entry.dtype not in WEIGHT_DTYPES:
            problems.append(f"{source.name} in {entry.file.name} is {entry.dtype}; F32, BF16 and F16 can be read")
    parts = [(source.expert, source.half) for source in sources]
    if len(set(parts)) < len(parts):
        problems.append(f"{name} is filled twice, by {_listed([source.name for source in sources])}")
    elif sources and (None, None) not in parts:
        if absent := _absent(name, parameter.shape[0], set(parts)):
            problems.append(f"no tensor fills {_listed(absent)}")
    elif len(parts) > 1:
        problems.append(f"{name} is both fused and per expert, in {_listed([source.name for source in sources])}")
    return problems


def _absent(name: str, experts: int, parts: set[tuple[int | None, int | None]]) -> list[str]:
    """Names of the expert tensors that a parameter lacks, without the prefix of the file."""
    fused = name.endswith("gate_up_proj")
    halves = {0: "gate_proj", 1: "up_proj"} if fused else {None: "down_proj"}
    stem = name.removesuffix("gate_up_proj" if fused else "down_proj")
    wanted = ((expert, half) for expert in range(experts) for half in halves)
    return [f"{stem}{expert}.{halves[half]}.weight" for expert, half in wanted if (expert, half) not in parts]


def _part(parameter: torch.Tensor, source: Source) -> tuple:
    """Index of the part of a parameter that a source fills."""
    if source.expert is None:
        return ()
    expert = min(source.expert, parameter.shape[0] - 1)
    if source.half is None:
        return (expert,)
    width = parameter.shape[1] // 2
    return (expert, slice(source.half * width, (source.half + 1) * width))


def _assemble(files: CheckpointFiles, parameter: torch.Tensor, sources: list[Source], dtype: torch.dtype) -> torch.Tensor:
    if sources[0].expert is None:
        return files.read(sources[0].name).to(dtype)
    value = torch.empty(parameter.shape, dtype=dtype)
    for source in sources:
        value[_part(parameter, source)] = files.read(source.name).to(dtype)
    return value


def _replace(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    module, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(module), attribute, parameter)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more
