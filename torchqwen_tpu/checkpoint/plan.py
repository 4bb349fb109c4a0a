"""Which tensors of the files fill which parameters, and all that does not fit, found from the headers alone."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from torchqwen_tpu.checkpoint.files import CheckpointFiles
from torchqwen_tpu.checkpoint.fp8 import scale_shape
from torchqwen_tpu.checkpoint.header import CheckpointError
from torchqwen_tpu.checkpoint.names import SCALE, Source, expert_name, is_carried, parameter_of, scale_of

QUANTIZED_DTYPE = "F8_E4M3"
SCALE_DTYPES = ("F32", "BF16", "F16")
WEIGHT_DTYPES = ("F32", "BF16", "F16", QUANTIZED_DTYPE)
"""Types that the weights of a model may have in a file."""
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
LISTED = 5
"""How many names an error lists."""


@dataclass
class Plan:
    """For every parameter (in its published form) the tensors that fill it, and what does not fit.

    Attributes:
        sources: by parameter.
        missing: tensors that the model needs and the files lack.
        unexpected: tensors of the files that nothing takes, scales among them.
        mismatched: sentences about tensors of a wrong shape or type, or that are there twice.
    """

    sources: dict[str, list[Source]]
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        return not (self.missing or self.unexpected or self.mismatched)

    def check(self, files: CheckpointFiles) -> None:
        """Raises CheckpointError if anything does not fit, naming it."""
        problems = []
        if self.missing:
            problems.append(f"no tensor fills {_listed(self.missing)}")
        if self.unexpected:
            where = {name: f"{name} in {files.tensors[name].file.name}" for name in self.unexpected}
            problems.append(f"no parameter takes {_listed(list(where.values()))}")
        problems += self.mismatched[:LISTED]
        if len(self.mismatched) > LISTED:
            problems.append(f"{len(self.mismatched) - LISTED} more tensors do not fit")
        if problems:
            raise CheckpointError(f"{files.folder} does not fit the model: " + "; ".join(problems))


def match(files: CheckpointFiles, parameters: dict[str, torch.Tensor]) -> Plan:
    """Find the tensors for `parameters`, which are in their published form (and may be on the meta device)."""
    plan = Plan({name: [] for name in parameters})
    for name in files.tensors:
        if is_carried(name):
            continue
        if name.endswith(SCALE):
            scaled = files.tensors.get(name.removesuffix(SCALE))
            if scaled is None or scaled.dtype != QUANTIZED_DTYPE:
                plan.unexpected.append(name)
            continue
        parameter, source = parameter_of(name)
        if parameter in plan.sources:
            plan.sources[parameter].append(source)
        elif not (parameter == HEAD and EMBEDDING in parameters):  # a copy of tied embeddings
            plan.unexpected.append(name)
    for name, sources in plan.sources.items():
        _find_gaps(plan, name, parameters[name].shape, sources)
        for source in sources:
            _check_tensor(plan, files, source, parameters[name].shape)
    return plan


def part_of(shape: tuple[int, ...], source: Source) -> tuple:
    """Index of the part of a parameter of this shape that a source fills."""
    if source.expert is None:
        return ()
    if source.half is None:
        return (source.expert,)
    width = shape[1] // 2
    return (source.expert, slice(source.half * width, (source.half + 1) * width))


def _part_shape(shape: tuple[int, ...], source: Source) -> tuple[int, ...]:
    if source.expert is None:
        return tuple(shape)
    return tuple(shape[1:]) if source.half is None else (shape[1] // 2, *shape[2:])


def _check_tensor(plan: Plan, files: CheckpointFiles, source: Source, shape: tuple[int, ...]) -> None:
    """Shape and type of one tensor, and its scales."""
    entry, expected = files.tensors[source.name], _part_shape(shape, source)
    where = f"{source.name} in {entry.file.name}"
    if source.expert is not None and source.expert >= shape[0]:
        plan.mismatched.append(f"{where} is expert {source.expert} of {shape[0]}")
    elif entry.shape != expected:
        plan.mismatched.append(f"{where} has shape {list(entry.shape)}, the model {list(expected)}")
    if entry.dtype not in WEIGHT_DTYPES:
        plan.mismatched.append(f"{where} is {entry.dtype}; F32, BF16, F16 and (with scales) F8_E4M3 can be read")
    if entry.dtype != QUANTIZED_DTYPE:
        return
    scale = files.tensors.get(scale_of(source.name))
    if scale is None:
        plan.mismatched.append(f"{where} is F8_E4M3 and no tensor {scale_of(source.name)} holds its scales")
    elif len(entry.shape) < 2:
        plan.mismatched.append(f"{where} is F8_E4M3 and no matrix")
    else:
        where, wanted = f"{scale_of(source.name)} in {scale.file.name}", scale_shape(entry.shape)
        if scale.shape != wanted:
            plan.mismatched.append(f"{where} has shape {list(scale.shape)}, one for each block of 128×128 are {list(wanted)}")
        if scale.dtype not in SCALE_DTYPES:
            plan.mismatched.append(f"{where} is {scale.dtype}; scales may be {', '.join(SCALE_DTYPES)}")


def _find_gaps(plan: Plan, name: str, shape: tuple[int, ...], sources: list[Source]) -> None:
    """What is missing of one parameter, and what of it is there twice."""
    parts = {(source.expert, source.half) for source in sources}
    names = _listed([source.name for source in sources])
    if not sources:
        plan.missing.append(name)
    elif len(parts) < len(sources):
        plan.mismatched.append(f"{name} is filled twice, by {names}")
    elif (None, None) in parts:
        if len(parts) > 1:
            plan.mismatched.append(f"{name} is both fused and per expert, in {names}")
    else:
        halves = (0, 1) if name.endswith("gate_up_proj") else (None,)
        wanted = [(expert, half) for expert in range(shape[0]) for half in halves]
        plan.missing += [expert_name(name, *part) for part in wanted if part not in parts]


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more
