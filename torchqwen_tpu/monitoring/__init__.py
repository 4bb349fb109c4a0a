"""A numerical watch over a model as it runs, and the comparison of two configurations."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from torchqwen_tpu.models.causal_lm import CausalLM
from torchqwen_tpu.monitoring.limits import Finding, Limits
from torchqwen_tpu.monitoring.watch import NumericalWarning, Watch

__all__ = ["Finding", "Limits", "NumericalWarning", "Watch", "watch"]


@contextlib.contextmanager
def watch(
    model: CausalLM, *, limits: Limits | None = None, stream: str | Path | None = None, report: str | Path | None = None,
    every: int = 1,
) -> Iterator[Watch]:  # fmt: skip
    """Watch the numbers of a model in everything that it computes inside the `with` block.

    Forward, generation and scoring alike: each prefill step is looked at, and of the decode steps that run in one go the
    first. NaN and infinity are looked for in every step and every token. (In prefill, Gated DeltaNet and attention work on
    blocks of tokens, and one that is not finite spoils its whole block: there the first token named is the block's.) Steps
    that are watched compile once more; afterwards those without a watch run as before.

    Args:
        limits: what to warn beyond; each layer and limit warns once (`NumericalWarning`).
        stream: a file that gets one JSON object a step, decode steps that run in one go being one.
        report: an HTML page that is written at the end; also `Watch.report(path)` at any time.
        every: look at the first prefill step and then at every so many-th, and so at decode steps that run in one go. The
            others run as without a watch, which divides its cost; what they compute is seen if it lasts.

    Raises:
        RuntimeError: the model is watched already.
        ValueError: `every` is below 1.
    """
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open(stream, "w", encoding="utf-8")) if stream is not None else None
        watching = Watch(model, limits or Limits(), file, every)
        try:
            with watching:
                yield watching
        finally:
            if report is not None:
                watching.report(report)
