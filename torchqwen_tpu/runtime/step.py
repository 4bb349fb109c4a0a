"""Steps of the model, compiled once a bucket of shapes and then run with little host work."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from tqdm.auto import tqdm
from transformers.utils import logging

from torchqwen_tpu.batch import RaggedBatch, place_header
from torchqwen_tpu.cache import HybridCache
from torchqwen_tpu.config import RuntimeConfig
from torchqwen_tpu.models.layers import Linear
from torchqwen_tpu.models.qwen3_5 import TextModel
from torchqwen_tpu.ops import Operations
from torchqwen_tpu.recording import LayerInputs
from torchqwen_tpu.runtime.graph import CompiledGraph, scan
from torchqwen_tpu.runtime.observation import Extended, Observer, Records, recorded, split_records
from torchqwen_tpu.runtime.penalties import Penalties, penalty_header
from torchqwen_tpu.runtime.shapes import EOS_SLOTS, DecodeShape, ExtendShape


class Steps:
    """Compiled steps of one model.

    Args:
        decoder, head: the modules, their parameters on the device; without a head the embedding serves as one.

    Attributes:
        observer: sees the steps that it wants to; None costs nothing.
    """

    def __init__(self, decoder: TextModel, head: Linear | None, ops: Operations, runtime: RuntimeConfig):
        self.decoder, self.head, self.ops, self.runtime = decoder, head, ops, runtime
        self.observer: Observer | None = None
        self._graphs: dict[ExtendShape | DecodeShape, CompiledGraph] = {}
        self._traced: list[tuple[int, int]] = []
        self._neutral: dict[int, torch.Tensor] = {}

    def extend(
        self, shape: ExtendShape, cache: HybridCache, header: torch.Tensor, embeddings: torch.Tensor | None = None
    ) -> Extended:
        """Take tokens into the cache.

        Args:
            header: [ranks, width] as `shape.header` packs it, on the host.
            embeddings: [ranks * tokens, hidden size] on the device, in place of token ids.

        The cache's states are replaced by the new ones.
        """
        inputs = [place_header(self.ops.mesh, header)]
        if embeddings is not None:
            inputs.append(embeddings)
        outputs, seen = self._run(shape, inputs, cache, f"step of {shape.tokens} tokens")
        outputs, records = split_records(shape.recorders, outputs)
        count = len(cache.states)
        cache.states = outputs[:count]
        if seen:
            self.observer.extended(shape, header, seen)
        return Extended(outputs[count], outputs[count + 1 :], records)

    def decode(
        self, shape: DecodeShape, cache: HybridCache, header: torch.Tensor, sampling: torch.Tensor,
        penalties: Penalties | None = None,
    ) -> np.ndarray:  # fmt: skip
        """Generate up to `decode_steps` tokens a sequence, of each as many as its `steps`.

        Args:
            header: as `shape.header` packs it, on the host.
            sampling: [ranks, 3 * rows] float32 on the host: temperature, top_p and min_p.
            penalties: None for none; greedy search with `candidates` 0 knows none.

        Returns: [decode_steps + 1, ranks * rows]: the tokens of each step, then the new lengths.
        """
        mesh = self.ops.mesh
        inputs = [place_header(mesh, header), mesh.put(sampling, ("tokens", None))]
        if shape.candidates:
            inputs.append(self.place_penalties(shape.rows, penalties))
        outputs, seen = self._run(shape, inputs, cache, f"decode step of {shape.rows} sequences")
        outputs, _ = split_records(shape.recorders, outputs)
        cache.states = outputs[:-1]
        if seen:  # while the device works
            self.observer.decoded(shape, header, seen)
        return mesh.get(outputs[-1]).numpy()

    def place_penalties(self, rows: int, penalties: Penalties | None) -> torch.Tensor:
        """Penalties on the device. Those that change nothing lie there already: history is large, and few ask for it."""
        mesh = self.ops.mesh
        if penalties is not None and not penalties.neutral:
            return place_header(mesh, penalties.pack())
        if rows not in self._neutral:
            self._neutral[rows] = place_header(mesh, Penalties(mesh.ranks, rows, self.vocabulary).pack())
        return self._neutral[rows]

    def penalized(self, logits: torch.Tensor, penalties: torch.Tensor, generated: torch.Tensor, eos: torch.Tensor):
        """Logits [R*N, vocabulary] under placed penalties; `generated` and `eos` as for `custom_ops.sampling.penalize`."""
        own = self._unpack_penalties(penalties, len(logits) // self.ops.mesh.ranks)
        return self.ops.penalize(logits, own["seen"], own["penalty"], own["least"], generated, eos)

    def _unpack_penalties(self, penalties: torch.Tensor, rows: int) -> dict[str, torch.Tensor]:
        own = {name: value.reshape(-1) for name, value in penalty_header(rows, self.vocabulary).unpack(penalties).items()}
        return {**own, "seen": own["seen"].view(self.ops.mesh.ranks * rows, -1)}

    @property
    def vocabulary(self) -> int:
        return self.decoder.embed_tokens.weight.shape[0]

    def _run(self, shape, inputs: list[torch.Tensor], cache: HybridCache, what: str) -> tuple[list[torch.Tensor], Records]:
        """The outputs of a step, and what was recorded for the observer alone."""
        watching = (self.observer.recorder,) if self.observer is not None and self.observer.due(shape) else ()
        if watching:
            shape = replace(shape, recorders=(*shape.recorders, *watching))
        states = range(len(inputs), len(inputs) + len(cache.states))
        inputs = [*inputs, *cache.states]
        if (weights := self._weights()) != self._traced:
            self._graphs.clear()  # graphs hold the weights that they were traced with
            self._traced = weights
        if shape not in self._graphs:
            with _compiling(what):
                self._graphs[shape] = CompiledGraph(lambda *tensors: self.trace(shape, tensors), inputs, donated=states)
        return split_records(watching, self._graphs[shape](inputs))

    def trace(self, shape: ExtendShape | DecodeShape, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What a step computes of its inputs: header, embeddings or sampling parameters with penalties, states. The new states
        come first."""
        return (self._trace_decode if isinstance(shape, DecodeShape) else self._trace_extend)(shape, tensors)

    def graph(self, shape: ExtendShape | DecodeShape) -> CompiledGraph:
        """The compiled step of a shape that has run."""
        return self._graphs[shape]

    def _weights(self) -> list[tuple[int, int]]:
        """What tells whether a weight was replaced or changed in place."""
        modules = [module for module in (self.decoder, self.head) if module is not None]
        return [(id(tensor), tensor._version) for module in modules for tensor in module.parameters()]

    def _scores(self, hidden: torch.Tensor, target: torch.Tensor, alternatives: int) -> torch.Tensor:
        tied = self.head is None
        head = self.decoder.embed_tokens.weight if tied else self.head.weight
        return self.ops.target_scores(hidden, head, target.reshape(-1), tied=tied, top_k=alternatives)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self.decoder.embed_tokens.weight) if self.head is None else self.head(hidden)

    def _trace_extend(self, shape: ExtendShape, tensors: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        header = shape.header.unpack(tensors[0])
        if shape.embeddings:
            embeddings, states = tensors[1], tensors[2:]
        else:
            embeddings, states = F.embedding(header["tokens"].reshape(-1), self.decoder.embed_tokens.weight), tensors[1:]
        batch = RaggedBatch(
            positions=_by_axis(header["positions"]),
            query_start=header["query_start"].reshape(-1),
            query_length=header["query_length"].reshape(-1),
            context_length=header["context_length"].reshape(-1),
            slot=header["slot"].reshape(-1),
            page_table=header["page_table"].reshape(-1, shape.cache.pages),
            decode=shape.decode,
        )
        recorders = (*shape.recorders, LayerInputs()) if shape.hidden_states else shape.recorders
        output = self.decoder(embeddings, batch, states, self.ops, recorders)
        select = header["select"].reshape(-1)
        hidden = self.ops.select(output.hidden, select)
        records = recorded(recorders, output, batch, lambda rows: self.ops.select(rows, select), self.ops)
        layers = []
        if shape.hidden_states:
            layers = [*records.pop(), hidden]
        if shape.alternatives is None:
            result = self._logits(hidden)
        else:
            result = self._scores(hidden, header["target"], shape.alternatives)
        return [*output.states, result, *layers, *records]

    def _trace_decode(self, shape: DecodeShape, tensors: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        header, rows = shape.header.unpack(tensors[0]), shape.rows
        row = torch.arange(rows, dtype=torch.int32, device=tensors[0].device).repeat(self.ops.mesh.ranks)

        # What a step reads is part of the carry even where it never changes: tensors that scan finds by itself are
        # captured with the values they have now.
        def one_step(carry, number, first=False):
            token, finished, fed, length, generated, seen, states, constant = carry
            finished, fed = finished > 0, fed > 0  # scan carries no booleans
            # A finished sequence still takes in its stop token, as in transformers, unless nothing else goes on.
            active = ~fed & (number < constant["steps"]) & ~finished.all()
            batch = RaggedBatch(
                positions=torch.where(active, length + constant["offsets"], -1),
                query_start=constant["row"],
                query_length=active.to(torch.int32),
                context_length=length,
                slot=constant["row"],
                page_table=constant["page_table"],
                decode=True,
                first=first,
            )
            embeddings = F.embedding(token, self.decoder.embed_tokens.weight)
            output = self.decoder(embeddings, batch, states, self.ops, shape.recorders)
            logits = self._logits(output.hidden).float()
            if shape.candidates:
                logits = self.ops.penalize(
                    logits, seen, constant["penalty"], constant["least"], generated, constant["eos"]
                )
                chosen = self.ops.sample(
                    logits, constant["seed"], generated, constant["temperature"], constant["top_k"], constant["top_p"],
                    constant["min_p"], candidates=shape.candidates,
                )  # fmt: skip
            else:
                chosen = logits.argmax(-1).to(torch.int32)
            fed = fed | (active & finished)
            going = active & ~finished
            token = torch.where(going, chosen, token)
            if shape.candidates:
                seen = self.ops.mark(seen, token, going)
            finished = finished | (going & (token.unsqueeze(1) == constant["eos"]).any(1))
            length = length + active.to(torch.int32)
            generated = generated + going.to(torch.int32)
            flags = (finished.to(torch.int32), fed.to(torch.int32))
            records = recorded(shape.recorders, output, batch, lambda rows: rows, self.ops)
            return (token, *flags, length, generated, seen, output.states, constant), (token, *records)

        flat = {name: value.reshape(-1) for name, value in header.items()}
        temperature, top_p, min_p = (part.reshape(-1) for part in tensors[1].chunk(3, dim=1))
        constant = {
            "row": row,
            "offsets": _by_axis(header["offsets"]),
            "page_table": flat["page_table"].view(-1, shape.cache.pages),
            "steps": flat["steps"],
            "eos": flat["eos"].view(-1, EOS_SLOTS),
        }
        seen, states = (), tensors[2:]
        if shape.candidates:
            penalties, states = self._unpack_penalties(tensors[2], rows), tensors[3:]
            seen = penalties.pop("seen")
            constant |= {**penalties, "seed": flat["seed"], "top_k": flat["top_k"]}
            constant |= {"temperature": temperature, "top_p": top_p, "min_p": min_p}
        carry = (
            flat["token"], flat["finished"], flat["fed"], flat["context_length"], flat["generated"], seen,
            tuple(states), constant,
        )  # fmt: skip
        numbers = torch.arange(self.runtime.decode_steps, dtype=torch.int32, device=tensors[0].device)
        steps = []
        if shape.recorders:  # they look at more in the first step than in the others
            carry, results = one_step(carry, numbers[0], first=True)
            steps.append([result.unsqueeze(0) for result in results])
            numbers = numbers[1:]
        if len(numbers):
            carry, results = scan(one_step, carry, numbers)
            steps.append(results)
        tokens, *records = (torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*steps, strict=True))
        _, _, _, length, _, _, states, _ = carry
        return [*states, torch.cat([tokens, length.unsqueeze(0)]), *records]


def _by_axis(values: torch.Tensor) -> torch.Tensor:
    """[ranks, 3 * n], axis by axis within a rank → [3, ranks * n]."""
    return values.view(values.shape[0], 3, -1).transpose(0, 1).reshape(3, -1)


@contextlib.contextmanager
def _compiling(what: str) -> Iterator[None]:
    """A progress bar for one compilation, shown as transformers shows its own."""
    with tqdm(total=1, desc=f"Compiling {what}", disable=not logging.is_progress_bar_enabled()) as bar:
        yield
        bar.update()
