"""`generate()` with transformers' signature: its preparation and its beams, our decode loop.

transformers prepares (configuration, logits processors, stopping criteria) and searches beams; its tensors stay on the
host. Greedy search and sampling run several tokens at a time on the device, and one at a time where something has to look
at every token's logits on the host.
"""

from __future__ import annotations

import contextvars
from collections.abc import Sequence

import numpy as np
import torch
from transformers import GenerationConfig
from transformers.generation import (
    EosTokenCriteria,
    GenerateDecoderOnlyOutput,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
)

from torchqwen_tpu.cache import HybridCache
from torchqwen_tpu.inputs import check_embeddings, check_ids, check_mask, columns_of, limit_of
from torchqwen_tpu.runtime.generate_batch import GenerationOutput, generate_batch
from torchqwen_tpu.runtime.packing import Row, extend
from torchqwen_tpu.runtime.penalties import Penalties
from torchqwen_tpu.runtime.processors import SamplingParameters
from torchqwen_tpu.runtime.sampling import choose_on_host
from torchqwen_tpu.runtime.shapes import EOS_SLOTS, DecodeShape

_UNSUPPORTED = {
    "assistant_model": "assisted generation would roll a recurrent state back; call generate() without it",
    "prompt_lookup_num_tokens": "assisted generation would roll a recurrent state back; call generate() without it",
    "negative_prompt_ids": "classifier-free guidance is not supported; pass a logits_processor instead",
    "negative_prompt_attention_mask": "classifier-free guidance is not supported; pass a logits_processor instead",
    "guidance_scale": "classifier-free guidance is not supported; pass a logits_processor instead",
    "custom_generate": "custom decoding loops are not supported; pass logits_processor and stopping_criteria instead",
    "num_beam_groups": "groups of beams are not supported; use num_beams without groups",
    "constraints": "constrained beams are not supported; pass prefix_allowed_tokens_fn or a logits_processor instead",
    "force_words_ids": "constrained beams are not supported; pass prefix_allowed_tokens_fn or a logits_processor instead",
    "penalty_alpha": "contrastive search is not supported; use sampling or beams",
    "dola_layers": "DoLa decoding is not supported; use sampling or beams",
    "cache_implementation": "there is one cache here, made by the model; leave cache_implementation out",
    "prefill_chunk_size": "prefill is chunked by RuntimeConfig(prefill_chunk=...); leave prefill_chunk_size out",
    "output_attentions": "attention weights are never formed; leave output_attentions out",
    "output_hidden_states": "generate() keeps no hidden states; call forward() on the result with output_hidden_states=True",
}
_NO_EFFECT = {"guidance_scale": 1, "num_beam_groups": 1}
"""Values that switch the unsupported thing off, besides None, False and an empty one."""
_SEEDS: contextvars.ContextVar[int | Sequence[int] | None] = contextvars.ContextVar("seeds", default=None)


class Generation:
    """The part of the model that generates."""

    @torch.no_grad()
    def generate(
        self,
        inputs: torch.Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *args,
        seed: int | Sequence[int] | None = None,
        **kwargs,
    ):
        """As transformers' `generate`, with one argument more.

        Args:
            inputs: [batch, sequence] token ids (or `input_ids=`), with `attention_mask` for padding on any side.
            seed: of the sampling, one for all sequences or one each. A sequence's tokens then depend on its prompt, its
                seed and its number among `num_return_sequences` alone, whatever it is batched with and wherever it
                runs. Without it, seeds are drawn from torch's default generator.

        Raises:
            ValueError: bad input, or something that is not supported, with what to use instead.
        """
        self.steps  # noqa: B018, a model without weights is refused here
        _refuse_unsupported(kwargs, generation_config if generation_config is not None else self.generation_config)
        if "past_key_values" in kwargs:
            kwargs["cache"] = kwargs.pop("past_key_values")
        given, embeddings = inputs if inputs is not None else kwargs.get("input_ids"), kwargs.get("inputs_embeds")
        if given is None and embeddings is None:
            raise ValueError("generate() needs a prompt: pass input_ids (or inputs_embeds)")
        if embeddings is None:
            shape = check_ids(given, self.vocab_size).shape
        else:
            shape = check_embeddings(embeddings, self.config.hidden_size)
        if kwargs.get("attention_mask") is not None:  # here, because transformers drops a mask of ones
            check_mask(kwargs["attention_mask"], shape, getattr(kwargs.get("cache"), "columns", 0))
        device = given.device if given is not None else embeddings.device
        if given is None:
            kwargs["input_ids"] = torch.zeros(shape[0], 0, dtype=torch.long)  # transformers' own would lie on the device
        inputs, kwargs = _on_host(inputs), {name: _on_host(value) for name, value in kwargs.items()}
        token = _SEEDS.set(seed)
        try:
            output = super().generate(inputs, generation_config, *args, **kwargs)
        finally:
            _SEEDS.reset(token)
        if isinstance(output, torch.Tensor):
            return output.to(device)
        output.sequences = output.sequences.to(device)
        return output

    @torch.no_grad()
    def generate_batch(
        self,
        inputs: Sequence[Sequence[int]],
        generation_config: GenerationConfig | None = None,
        *,
        seed: int | Sequence[int] | None = None,
        progress_bar: bool = False,
        warmup: bool = False,
        continuous_batching_config=None,
        record_timestamps: bool = False,
        persistent_manager: bool = False,
        **kwargs,
    ) -> dict[str, GenerationOutput]:
        """As transformers' `generate_batch`: prompts of any lengths, continued by continuous batching on an `Engine`.

        Args:
            inputs: token ids of each prompt.
            generation_config: as for `generate`; num_return_sequences included.
            seed: as for `generate`.
            warmup: compile everything before the first step, and not what is needed when it is needed.
            kwargs: settings in place of the configuration's, for example max_new_tokens.

        Returns: outputs by request, in the order of the inputs. One that was refused has status FAILED and an `error`.
        """
        if continuous_batching_config is not None or record_timestamps or persistent_manager:
            raise ValueError(
                "continuous_batching_config, record_timestamps and persistent_manager are not supported; make a "
                "torchqwen_tpu.Engine(model, EngineConfig(...)) for an engine that stays"
            )
        if not inputs:
            return {}
        config = generation_config if generation_config is not None else self.generation_config
        copies = kwargs.get("num_return_sequences") or config.num_return_sequences or 1
        seeds = _row_seeds(seed, len(inputs) * copies, copies).reshape(len(inputs), copies)
        return generate_batch(self, inputs, generation_config, seeds, progress_bar=progress_bar, warmup=warmup, **kwargs)

    def init_continuous_batching(self, *args, **kwargs):
        """transformers' manager of continuous batching, whose place the engine takes."""
        raise NotImplementedError("there is no manager; make a torchqwen_tpu.Engine(model) and use add(), step() and stream()")

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length):
        """transformers' hook: the cache of a generation, for all beams or returned sequences of the batch."""
        if _SEEDS.get() is not None and generation_config.do_sample and generation_config.num_beams > 1:
            raise ValueError("seed: sampled beams draw from torch's default generator; call torch.manual_seed() instead")
        sequences = batch_size * max(generation_config.num_beams, generation_config.num_return_sequences)
        if max_cache_length + 1 > limit_of(self.config):
            raise ValueError(
                f"prompt and new tokens come to {max_cache_length + 1}, and the model's limit is {limit_of(self.config)} "
                "(max_position_embeddings); shorten the prompt or lower max_new_tokens"
            )
        model_kwargs["cache"] = self._continued(model_kwargs.get("cache"), (sequences, max(max_cache_length, 1)))
        model_kwargs["cache"].expect(max_cache_length)
        generation_config.use_cache = True  # the recurrent states are always kept; without them every answer is the same

    def _prepare_position_ids_for_generation(self, inputs_tensor, model_kwargs):
        """transformers' hook: `forward` counts tokens itself."""
        return None

    def _reorder_cache(self, cache: HybridCache, beam_idx: torch.Tensor) -> HybridCache:
        """transformers' hook of beam search."""
        cache.reorder_cache(beam_idx)
        return cache

    def prepare_inputs_for_generation(
        self, input_ids, next_sequence_length=None, cache=None, attention_mask=None, inputs_embeds=None,
        position_ids=None, is_first_iteration=False, **kwargs,
    ):  # fmt: skip
        """transformers' hook: arguments of one `forward` of beam search, left on the host."""
        use_embeddings = inputs_embeds is not None and is_first_iteration
        source = inputs_embeds if use_embeddings else input_ids
        columns = source.shape[1] if next_sequence_length is None else next_sequence_length
        if columns < 1:
            raise _nothing_new(cache.columns, source.shape[1])
        model_inputs = {"inputs_embeds" if use_embeddings else "input_ids": source[:, -columns:]}
        if position_ids is not None and is_first_iteration:  # later tokens count on from there
            model_inputs["position_ids"] = position_ids[..., -columns:]
        return {**model_inputs, "cache": cache, "attention_mask": attention_mask, "logits_to_keep": 1}

    def _sample(
        self,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config,
        synced_gpus: bool = False,
        streamer=None,
        **model_kwargs,
    ):
        """transformers' hook: greedy search and sampling."""
        loop = _DecodeLoop(self, input_ids, logits_processor, stopping_criteria, generation_config, streamer, model_kwargs)
        logits = loop.prefill(model_kwargs)
        while not loop.take(loop.choose(logits)):
            logits = loop.decode_on_device() if loop.parameters is not None else loop.decode_one()
            if logits is None:
                break
        return loop.result()


class _DecodeLoop:
    """One generation: its sequences so far, and which of them go on."""

    def __init__(self, model, input_ids, processors, criteria, generation_config, streamer, model_kwargs):
        self.model, self.ids, self.processors, self.criteria = model, input_ids, processors, criteria
        self.config, self.streamer = generation_config, streamer
        self.cache: HybridCache = model_kwargs["cache"] if model_kwargs.get("cache") is not None else model._continued(
            None, (len(input_ids), generation_config.max_length)
        )
        self.batch = len(input_ids)
        self.finished = np.zeros(self.batch, bool)
        self.fed = np.zeros(self.batch, bool)  # finished, and the stop token is in the states
        self.generated = 0
        self.seeds = _row_seeds(_SEEDS.get(), self.batch, generation_config.num_return_sequences)
        wanted = generation_config.return_dict_in_generate
        self.scores = [] if wanted and generation_config.output_scores else None
        self.logits = [] if wanted and generation_config.output_logits else None
        self.eos = next((c.eos_token_id.cpu().numpy() for c in criteria if isinstance(c, EosTokenCriteria)), np.zeros(0, int))
        self.pad = 0 if generation_config._pad_token_tensor is None else int(generation_config._pad_token_tensor)
        self.parameters = self._device_parameters()

    def _device_parameters(self) -> SamplingParameters | None:
        """How the device chooses tokens; None where the host has to see every token."""
        if self.scores is not None or self.logits is not None or len(self.eos) > EOS_SLOTS:
            return None
        if any(type(criterion) not in (MaxLengthCriteria, EosTokenCriteria) for criterion in self.criteria):
            return None
        return SamplingParameters.from_processors(self.processors, self.config.do_sample, self.eos, self.ids.shape[1])

    def prefill(self, model_kwargs: dict) -> torch.Tensor:
        """Take the prompt into the cache; logits of every sequence's last token [batch, vocabulary], on the host."""
        model, cache, seen = self.model, self.cache, self.cache.columns
        embeddings, mask = model_kwargs.get("inputs_embeds"), model_kwargs.get("attention_mask")
        source = self.ids if embeddings is None else embeddings
        mask_length = mask.shape[1] if mask is not None else getattr(self.config, "_mask_length", source.shape[1])
        if mask_length == source.shape[1]:  # the whole sequence was passed, not only its new part
            if source.shape[1] <= seen:
                raise _nothing_new(seen, source.shape[1])
            source = source[:, seen:]
        ids = None if embeddings is not None else source.numpy()
        positions = model_kwargs.get("position_ids")
        if positions is not None:
            positions = positions[..., -source.shape[1] :]
        columns = columns_of(ids, tuple(source.shape[:2]), mask, positions, cache, limit_of(model.config))
        columns.want_last()
        for number, row in enumerate(columns.rows):
            if not len(row.tokens):
                raise ValueError(f"row {number} has no new token after the part that the cache has seen")
        if embeddings is not None:
            embeddings = source.reshape(-1, source.shape[-1]).to(model.dtype)
        logits = self._extend(columns.rows, embeddings)
        cache.columns += source.shape[1]
        return logits

    def _extend(self, rows: list[Row], embeddings: torch.Tensor | None = None) -> torch.Tensor:
        selected = extend(self.model.steps, self.cache, rows, embeddings)
        logits = torch.cat([self.cache.layout.mesh.get(step).float() for step in selected.steps])
        result = torch.zeros(self.batch, logits.shape[1])
        for number, place in enumerate(selected.place):
            if len(place):
                result[number] = logits[place[-1]]
        return result

    def choose(self, logits: torch.Tensor) -> np.ndarray:
        """The next token of every sequence from its logits, by transformers' processors and criteria."""
        scores = self.processors(self.ids, logits)
        if self.scores is not None:
            self.scores.append(scores)
        if self.logits is not None:
            self.logits.append(logits)
        if self.config.do_sample:
            return choose_on_host(scores.numpy(), self.seeds, np.full(self.batch, self.generated, np.int32))
        return scores.argmax(-1).numpy()

    def take(self, tokens: np.ndarray) -> bool:
        """Append one token a sequence, padding where it has finished; True when nothing goes on."""
        tokens = torch.from_numpy(np.where(self.finished, self.pad, tokens).astype(np.int64))
        self.ids = torch.cat([self.ids, tokens[:, None]], dim=1)
        self.generated += 1
        if self.streamer is not None:
            self.streamer.put(tokens)
        scores = tuple(self.scores) if self.scores is not None else None
        self.finished |= self.criteria(self.ids, scores).numpy()
        return bool(self.finished.all())

    def decode_one(self) -> torch.Tensor:
        """Take the last token of every going sequence into the cache: logits [batch, vocabulary] on the host."""
        rows, nothing = [], np.zeros(0, np.int64)
        for number, token in enumerate(self.ids[:, -1].numpy()):
            if self.fed[number]:
                rows.append(Row(nothing, np.zeros((3, 0), np.int32), nothing))
            else:
                position = self.cache.lengths[number] + self.cache.offsets[:, number, None]
                rows.append(Row(np.array([token]), position, np.zeros(1, np.int64)))
        logits = self._extend(rows)
        self.fed |= self.finished
        self.cache.columns += 1
        return logits

    def decode_on_device(self) -> None:
        """Generate up to the end, `decode_steps` tokens at a time; the host only reads what comes out."""
        cache, parameters, steps = self.cache, self.parameters, self.model.steps
        cache.reserve(self.config.max_length)
        ranks, rows = cache.layout.mesh.ranks, cache.shape.rows
        shape = DecodeShape(cache.shape, parameters.candidates(self.model.vocab_size))
        eos = np.full(EOS_SLOTS, -1, np.int32)
        eos[: len(self.eos)] = self.eos
        sampling = np.array([parameters.temperature, parameters.top_p, parameters.min_p], np.float32)
        sampling = torch.from_numpy(np.broadcast_to(np.repeat(sampling, rows), (ranks, 3 * rows)).copy())

        def over_ranks(values: np.ndarray, fill: int) -> np.ndarray:
            return np.concatenate([values.astype(np.int32), np.full(ranks * rows - self.batch, fill, np.int32)])

        while True:
            count = min(steps.runtime.decode_steps, self.config.max_length - self.ids.shape[1])
            header = shape.header.pack(
                ranks,
                token=over_ranks(self.ids[:, -1].numpy(), 0),
                finished=over_ranks(self.finished, 1),
                fed=over_ranks(self.fed, 1),
                context_length=cache.lengths,
                offsets=cache.offsets.reshape(3, ranks, rows).transpose(1, 0, 2),
                page_table=cache.page_table,
                seed=over_ranks(self.seeds, 0),
                generated=np.full(ranks * rows, self.generated),
                top_k=np.full(ranks * rows, parameters.top_k),
                steps=np.full(ranks * rows, count),
                eos=np.broadcast_to(eos, (ranks * rows, EOS_SLOTS)),
            )
            penalties = None
            if parameters.penalizes:
                penalties = Penalties(ranks, rows, self.model.vocab_size)
                ignored = np.broadcast_to(parameters.ignored, self.batch)
                for place, row in enumerate(self.ids.numpy()):
                    penalties.put(place, row[ignored[place] :], parameters.repetition_penalty, parameters.min_new_tokens)
            *tokens, lengths = steps.decode(shape, cache, header, sampling, penalties)
            cache.lengths = lengths.astype(np.int32)
            for step in tokens[:count]:
                self.fed |= self.finished
                cache.columns += 1
                if self.take(step[: self.batch]):
                    return None

    def result(self):
        if self.streamer is not None:
            self.streamer.end()
        if not self.config.return_dict_in_generate:
            return self.ids
        return GenerateDecoderOnlyOutput(
            sequences=self.ids,
            scores=None if self.scores is None else tuple(self.scores),
            logits=None if self.logits is None else tuple(self.logits),
            cache=self.cache,
        )


def _row_seeds(seed: int | Sequence[int] | None, rows: int, copies: int) -> np.ndarray:
    """A seed for every returned sequence, from one for all prompts or one for each."""
    if seed is None:
        return torch.randint(0, 2**31 - 1, (rows,)).numpy().astype(np.int32)
    prompts = np.broadcast_to(np.asarray(seed, np.int64), rows // copies) if np.ndim(seed) == 0 else np.asarray(seed, np.int64)
    if len(prompts) != rows // copies:
        raise ValueError(f"seed has {len(prompts)} entries for {rows // copies} prompts; pass one for all or one for each")
    numbers = np.repeat(prompts, copies) + 1_000_003 * np.tile(np.arange(copies), rows // copies)
    return (numbers % (2**31 - 1)).astype(np.int32)


def _refuse_unsupported(arguments: dict, generation_config: GenerationConfig) -> None:
    """Refuse what an argument, or else the configuration, asks for and there is no support for."""
    for name, remedy in _UNSUPPORTED.items():
        value = arguments.get(name, getattr(generation_config, name, None))
        if value is not None and (isinstance(value, torch.Tensor) or value not in (False, "", _NO_EFFECT.get(name))):
            raise ValueError(f"{name}: {remedy}")
    new_tokens = arguments.get("max_new_tokens", generation_config.max_new_tokens)
    if new_tokens is not None and new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, not {new_tokens}")


def _nothing_new(seen: int, passed: int) -> ValueError:
    return ValueError(
        f"the cache has seen {seen} columns and {passed} were passed; pass the whole sequence, its earlier part included"
    )


def _on_host(value):
    return value.cpu() if isinstance(value, torch.Tensor) else value
