"""The engine: requests come at any time, run together, and each gets what it would get alone."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

from torch_xla.runtime import device_type
from tqdm.auto import tqdm
from transformers import GenerationConfig
from transformers.utils import logging

from torchqwen_tpu.config import EngineConfig
from torchqwen_tpu.inputs import limit_of
from torchqwen_tpu.runtime.budget import plan_budget
from torchqwen_tpu.runtime.execution import Executor
from torchqwen_tpu.runtime.graph import compilations
from torchqwen_tpu.runtime.parameters import Parameters, resolve_parameters
from torchqwen_tpu.runtime.prefix import page_keys
from torchqwen_tpu.runtime.prompts import end_at_stop_string, prompt_tokens
from torchqwen_tpu.runtime.request import Request, RequestOutput
from torchqwen_tpu.runtime.scheduler import Scheduler
from torchqwen_tpu.runtime.statistics import Statistics

logger = logging.get_logger(__name__)

Params = GenerationConfig | Mapping | None


class Engine:
    """Continuous batching over the data-parallel ranks of a model.

    Requests are prefilled in chunks beside those that decode, leave when they are done, and share the pages of a common
    prefix. A request's tokens do not depend on the others, nor on when it came, nor on whether it had to start over for
    want of pages.

    Args:
        model: from `AutoModelForCausalLM.from_pretrained`.
        config: sizes and policy.
        tokenizer: for prompts that are texts, for `stop_strings`, and for the texts of outputs.
        warm_up: compile everything now, with a progress bar. Otherwise graphs are compiled when they are first needed.

    One thread drives an engine (`step`, `stream`, `generate`); `add` and `abort` may be called from any.

    Attributes:
        max_length: the most tokens of a request, prompt and new ones.
        statistics: what it has done.
    """

    def __init__(self, model, config: EngineConfig | None = None, *, tokenizer=None, warm_up: bool = True):
        self.config = config or EngineConfig()
        self.tokenizer = tokenizer
        self._defaults, self._vocabulary = model.generation_config, model.vocab_size
        steps, layout = model.steps, model._cache_layout
        budget = plan_budget(layout, self.config, limit_of(model.config))
        self.max_length = budget.max_length
        self._executor = Executor(steps, layout, budget.shape, budget.checkpoints, self.config.token_budget)
        mixed = device_type() == "TPU" if self.config.mixed is None else self.config.mixed
        self.scheduler = Scheduler(
            layout.mesh.ranks, budget.shape.rows, budget.shape.pool_pages, budget.shape.page_size, budget.checkpoints,
            widths=self._executor.widths, token_budget=self.config.token_budget,
            decode_steps=steps.runtime.decode_steps, mixed=mixed,
        )  # fmt: skip
        self._requests: dict[str, Request] = {}
        self._inbox: deque[tuple[str, Request | str]] = deque()  # from any thread
        self._outbox: list[RequestOutput] = []  # of requests that nobody asked about yet
        self._numbers = itertools.count()
        self._warm = False
        self.reset_statistics()
        if warm_up:
            self._warm_up()

    def generate(
        self, prompts: Sequence, params: Params | Sequence[Params] = None, *, progress: bool = True
    ) -> list[RequestOutput]:
        """Continue every prompt to its end.

        Args:
            prompts: each a list of token ids (or a text, with a tokenizer).
            params: one for all prompts, or one for each: a GenerationConfig, or a dict of its settings and `seed`.

        Returns: outputs in the order of the prompts. A request that is refused has `finish_reason` "error" and says why
            in `error`; the others finish.
        """
        outputs: dict[str, RequestOutput] = {}
        ids = []
        shown = progress and logging.is_progress_bar_enabled()
        with tqdm(total=len(prompts), desc="Generating", unit="request", disable=not shown) as bar:
            for output in self._run(prompts, params, ids):
                if output.finished:
                    outputs[output.request_id] = output
                    bar.update()
        return [outputs[request_id] for request_id in ids]

    def stream(self, prompts: Sequence, params: Params | Sequence[Params] = None) -> Iterator[RequestOutput]:
        """As `generate`, but every few tokens of every request come as they are made; `request_id`s count up in the order of
        the prompts. What is not finished when the iterator is closed is aborted."""
        return self._run(prompts, params, [])

    def add(self, prompt, params: Params = None, *, request_id: str | None = None) -> str:
        """Queue a request; `step` runs it.

        Returns: its id, made up if none is given.

        Raises:
            ValueError: a prompt that is not a list of token ids, unknown or unsupported parameters, an id in use, or a
                request that can never fit.
        """
        tokens = prompt_tokens(prompt, self.tokenizer, self._vocabulary)
        parameters = resolve_parameters(params, self._defaults, len(tokens))
        if parameters.stop_strings and self.tokenizer is None:
            raise ValueError("stop_strings need a tokenizer: Engine(model, tokenizer=...)")
        number = next(self._numbers)
        request_id = str(number) if request_id is None else request_id
        if request_id in self._requests:
            raise ValueError(f"request_id {request_id!r} is in use by a request that has not ended")
        request = Request(
            request_id, number, tokens, len(tokens), self._length_of(tokens, parameters), parameters, time.perf_counter()
        )
        if self.scheduler.ranks[0].pool.shares:
            request.keys = page_keys(tokens, self.scheduler.page_size)
        self._requests[request_id] = request
        self._inbox.append(("add", request))
        return request_id

    def abort(self, request_id: str) -> None:
        """End a request at once; its last output has what it generated and `finish_reason` "abort". An unknown or ended
        request is none of its business."""
        self._inbox.append(("abort", request_id))

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._inbox or self._outbox) or not self.scheduler.is_idle

    def step(self) -> list[RequestOutput]:
        """Prefill and decode once what is ready; returns outputs of the requests that went on."""
        started, compiled, device = time.perf_counter(), compilations(), self._executor.device_seconds
        outputs, self._outbox = self._outbox, []
        outputs += self._take_inbox()
        if self.scheduler.is_idle:
            return outputs
        executor, scheduler = self._executor, self.scheduler
        executor.restore(scheduler.admit())
        pieces = scheduler.prefill()
        self._count_use()
        went_on: dict[Request, None] = {}
        if any(pieces):
            self._prefill(pieces, went_on)
        turns = scheduler.decode()
        if turns:
            width, moves = scheduler.gather([request for request, _ in turns])
            executor.shift(moves)
            for (request, steps), tokens in zip(turns, executor.decode(turns, width), strict=True):
                scheduler.advance(request, steps)
                self._append(request, tokens)
                went_on[request] = None
        outputs += [self._output(request) for request in went_on]
        self._count(time.perf_counter() - started, executor.device_seconds - device, compilations() - compiled)
        return outputs

    def reset_statistics(self) -> None:
        """Count from zero."""
        self.statistics = Statistics()
        self._counted = (self.scheduler.preemptions, self.scheduler.reused_tokens)

    def forget_prefixes(self) -> None:
        """Free the pages of prefixes that no request uses."""
        for rank in self.scheduler.ranks:
            rank.pool.forget()

    def _run(self, prompts: Sequence, params, ids: list[str]) -> Iterator[RequestOutput]:
        params = [params] * len(prompts) if params is None or isinstance(params, (GenerationConfig, Mapping)) else params
        if len(params) != len(prompts):
            raise ValueError(f"{len(params)} params for {len(prompts)} prompts; pass one for all or one for each")
        pending = set()
        try:
            for prompt, own in zip(prompts, params, strict=True):
                try:
                    ids.append(self.add(prompt, own))
                    pending.add(ids[-1])
                except ValueError as error:
                    ids.append(str(next(self._numbers)))
                    yield RequestOutput(ids[-1], [], [], [], finish_reason="error", error=str(error))
            others = []
            while pending:
                for output in self.step():
                    if output.request_id not in pending:
                        others.append(output)
                        continue
                    if output.finished:
                        pending.discard(output.request_id)
                    yield output
                self._outbox, others = self._outbox + others, []
        finally:
            for request_id in pending:
                self.abort(request_id)

    def _length_of(self, tokens: list[int], parameters: Parameters) -> int:
        """Length at which a request ends."""
        new = parameters.max_new_tokens
        length = self.max_length if new is None else len(tokens) + new
        if max(length, len(tokens) + 1) > self.max_length:
            raise ValueError(
                f"a prompt of {len(tokens)} tokens and {new or 1} new ones can never fit: the engine takes {self.max_length} "
                "tokens a request; shorten it, or make the engine with more pages or max_length"
            )
        return length

    def _take_inbox(self) -> list[RequestOutput]:
        ended = []
        while self._inbox:
            kind, subject = self._inbox.popleft()
            if kind == "add":
                self.scheduler.add(subject)
            elif subject in self._requests:
                request = self._requests[subject]
                self._end(request, "abort")
                ended.append(self._output(request))
        return ended

    def _prefill(self, pieces, went_on: dict[Request, None]) -> None:
        moves = {}
        results = self._executor.prefill(pieces)
        for piece in itertools.chain(*pieces):
            self.statistics.prefill_tokens += piece.count
            for move in self.scheduler.advance(piece.request, piece.count):
                moves[move.rank, move.target] = move  # a place taken twice holds the later
        self._executor.save(list(moves.values()))
        for request, token in results:
            self._append(request, [token])
            went_on[request] = None

    def _append(self, request: Request, tokens: list[int]) -> None:
        """Tokens that were generated, all but a stop token followed by the next."""
        if request.first_token is None:
            request.first_token = time.perf_counter()
        before = request.generated
        request.tokens += tokens
        self.statistics.generated_tokens += len(tokens)
        stops = request.parameters.stop_strings
        end = end_at_stop_string(request.tokens[request.prompt_tokens :], before, stops, self.tokenizer) if stops else None
        if end is not None:
            del request.tokens[request.prompt_tokens + end :]
            self._end(request, "stop")
        elif request.tokens[-1] in request.parameters.eos:
            self._end(request, "stop")
        elif len(request.tokens) >= request.max_tokens:
            self._end(request, "length")

    def _end(self, request: Request, reason: str) -> None:
        request.finish_reason, request.ended = reason, time.perf_counter()
        self.scheduler.remove(request)
        del self._requests[request.id]

    def _output(self, request: Request) -> RequestOutput:
        tokens = request.tokens[request.prompt_tokens :]
        new = tokens[request.reported :]
        request.reported = len(tokens)
        return RequestOutput(
            request.id,
            request.tokens[: request.prompt_tokens],
            tokens,
            new,
            text=None if self.tokenizer is None else self.tokenizer.decode(tokens, skip_special_tokens=True),
            finish_reason=request.finish_reason,
            arrived=request.arrived,
            first_token=request.first_token,
            ended=request.ended,
        )

    def _count_use(self) -> None:
        """Of the pools, before requests that end in this step leave them."""
        statistics, ranks = self.statistics, self.scheduler.ranks
        statistics.pages += sum(rank.pool.used / rank.pool.total for rank in ranks) / len(ranks)
        slots = sum(len(rank.running) for rank in ranks)
        statistics.slots += slots / (len(ranks) * self._executor.shape.rows)

    def _count(self, seconds: float, device: float, compiled: int) -> None:
        statistics = self.statistics
        statistics.steps += 1
        statistics.step_seconds += seconds
        statistics.device_seconds += device
        statistics.preemptions = self.scheduler.preemptions - self._counted[0]
        statistics.reused_tokens = self.scheduler.reused_tokens - self._counted[1]
        if compiled and self._warm:
            statistics.compilations += compiled
            logger.error(f"{compiled} graphs were compiled in service, after warm-up; please report this as a fault")

    def _warm_up(self) -> None:
        shown = logging.is_progress_bar_enabled()
        with tqdm(total=self._executor.graphs, desc="Warming up the engine", unit="graph", disable=not shown) as bar:
            self._executor.warm_up(bar.update)
        self._warm = True
