"""A request to the engine, and what comes back."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchqwen_tpu.runtime.parameters import Parameters
from torchqwen_tpu.runtime.prefix import Node


@dataclass(eq=False)
class Request:
    """One sequence on its way through the engine.

    Attributes:
        number: order of arrival.
        tokens: the prompt, then what was generated.
        prompt_tokens: length of the prompt.
        max_tokens: length at which it ends.
        keys: what the prompt's full pages are looked up by.
        rank, slot: where it runs; None while it waits.
        pages: its page table. The first are shared, those of `nodes`.
        computed: tokens that its states and pages hold.
        cuts: lengths at which prefill stops so that the states there can be kept.
        reported: tokens that were handed out.
        finish_reason: "stop", "length" or "abort" once it has ended.
        times: seconds, on the clock of time.perf_counter: arrival, first token, end.
    """

    id: str
    number: int
    tokens: list[int]
    prompt_tokens: int
    max_tokens: int
    parameters: Parameters
    arrived: float
    keys: list[bytes] = field(default_factory=list)
    rank: int | None = None
    slot: int | None = None
    pages: list[int] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    computed: int = 0
    cuts: list[int] = field(default_factory=list)
    reported: int = 0
    finish_reason: str | None = None
    first_token: float | None = None
    ended: float | None = None

    @property
    def pending(self) -> int:
        """Tokens that the model has yet to take."""
        return len(self.tokens) - self.computed

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def decodes(self) -> bool:
        """Nothing is left but the token that the next one follows from."""
        return self.pending == 1


@dataclass(frozen=True)
class RequestOutput:
    """How far a request has come.

    Attributes:
        new_token_ids: tokens since the request's last output.
        token_ids: all generated tokens.
        text: of all generated tokens, where the engine has a tokenizer.
        finish_reason: None while it runs; then "stop" (a stop token or string), "length", "abort" or "error".
        error: what was wrong with a request that was refused.
        arrived, first_token, ended: seconds on the clock of time.perf_counter; None for what has not happened.
    """

    request_id: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    new_token_ids: list[int]
    text: str | None = None
    finish_reason: str | None = None
    error: str | None = None
    arrived: float | None = None
    first_token: float | None = None
    ended: float | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None
