"""One text under two configurations: how far the layers' outputs and the next-token distributions come apart."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from html import escape

import numpy as np
import torch
from tqdm.auto import tqdm
from transformers.utils import logging

from torchqwen_tpu.monitoring.plots import Series, line_plot, page, table
from torchqwen_tpu.monitoring.sides import Side

BINS = 32
"""Stretches of the text that a summary tells apart."""
ROWS_AT_ONCE = 64
"""Rows of logits that are in float64 at one time."""


@dataclass(frozen=True)
class Comparison:
    """How side b differs from side a, token by token.

    Attributes:
        a, b: the settings, as given.
        chunk: tokens a step: states are stored, and so rounded, once a step.
        kl: [length] KL(a ‖ b) of the next-token distributions, in nats.
        agrees: [length] whether both find the same next token most likely.
        logprob_a, logprob_b: [length - 1] what each gives the token that follows, in nats.
        error, power: [layers, length] squared norms, of the difference of the layers' outputs and of side a's output; the
            last layer's output is taken after the final norm.
    """

    a: str
    b: str
    chunk: int
    kl: np.ndarray
    agrees: np.ndarray
    logprob_a: np.ndarray
    logprob_b: np.ndarray
    error: np.ndarray
    power: np.ndarray

    def relative_rmse(self, first: int = 0, last: int | None = None) -> np.ndarray:
        """[layers] over the tokens first to last."""
        error, power = self.error[:, first:last].sum(1), self.power[:, first:last].sum(1)
        return np.sqrt(error / np.maximum(power, np.finfo(np.float64).tiny))

    @property
    def edges(self) -> np.ndarray:
        """Where the stretches of a summary begin and end."""
        count = min(BINS, len(self.kl))
        return np.linspace(0, len(self.kl), count + 1).astype(int)

    def summary(self) -> dict:
        """As JSON: the whole, each layer, and stretches of the text."""
        stretches = [
            {
                "first": int(first), "last": int(last) - 1,
                "kl_mean": float(self.kl[first:last].mean()), "kl_max": float(self.kl[first:last].max()),
                "agreement": float(self.agrees[first:last].mean()),
                "relative_rmse": self.relative_rmse(first, last).tolist(),
            }
            for first, last in zip(self.edges[:-1], self.edges[1:], strict=True)
        ]  # fmt: skip
        return {
            "a": self.a, "b": self.b, "length": len(self.kl), "chunk": self.chunk,
            "kl_mean": float(self.kl.mean()), "kl_max": float(self.kl.max()), "kl_max_position": int(self.kl.argmax()),
            "agreement": float(self.agrees.mean()),
            "nll_a": float(-self.logprob_a.mean()), "nll_b": float(-self.logprob_b.mean()),
            "relative_rmse": self.relative_rmse().tolist(), "by_position": stretches,
        }  # fmt: skip


def compare(
    sides: tuple[Side, Side], tokens: np.ndarray, chunk: int, names: tuple[str, str] = ("a", "b"), progress: bool = True
) -> Comparison:
    """Give both sides the same tokens, `chunk` of them at a time; no more than a chunk's logits exist at once.

    Raises:
        ValueError: fewer than two tokens, or more than a side takes.
    """
    if len(tokens) < 2 or chunk < 1:
        raise ValueError(f"a comparison needs at least 2 tokens and a chunk of 1, not {len(tokens)} and {chunk}")
    for side in sides:
        if len(tokens) > side.limit:
            raise ValueError(f"{len(tokens)} tokens are more than the model takes ({side.limit}); lower the length")
    parts = []
    disable = not progress or not logging.is_progress_bar_enabled()
    with tqdm(total=len(tokens), desc="Comparing", unit="tok", disable=disable) as bar:
        for first in range(0, len(tokens), chunk):
            piece = tokens[first : first + chunk]
            following = tokens[first + 1 : first + 1 + len(piece)]
            parts.append(_divergence(*(side.take(piece) for side in sides), following))
            bar.update(len(piece))
    names_of = [entry.name for entry in dataclasses.fields(Comparison)][3:]
    joined = {name: np.concatenate([part[name] for part in parts], axis=-1) for name in names_of}
    return Comparison(*names, chunk, **joined)


def _divergence(a, b, following: np.ndarray) -> dict[str, np.ndarray]:
    """The arrays of `Comparison` for one chunk; `following` lacks its last token at the end of the text."""
    (layers_a, logits_a), (layers_b, logits_b) = a, b
    pairs = list(zip(layers_a[1:], layers_b[1:], strict=True))  # the first are the embeddings
    return _divergence_of_logits(logits_a, logits_b, torch.from_numpy(following.astype(np.int64))[:, None]) | {
        "agrees": (logits_a.argmax(-1) == logits_b.argmax(-1)).numpy(),
        "error": torch.stack([(own - other).double().square().sum(-1) for own, other in pairs]).numpy(),
        "power": torch.stack([own.double().square().sum(-1) for own, _ in pairs]).numpy(),
    }


def _divergence_of_logits(a: torch.Tensor, b: torch.Tensor, following: torch.Tensor) -> dict[str, np.ndarray]:
    """In float64, since a small KL drowns in the rounding of float32; a few rows at a time, since a vocabulary is wide."""
    kl, logprob_a, logprob_b = [], [], []
    for first in range(0, len(a), ROWS_AT_ONCE):
        rows = slice(first, first + ROWS_AT_ONCE)
        log_a, log_b = (logits[rows].double().log_softmax(-1) for logits in (a, b))
        kl.append((log_a.exp() * (log_a - log_b)).sum(-1).clamp(min=0))
        target = following[rows]
        logprob_a.append(log_a[: len(target)].gather(1, target)[:, 0])
        logprob_b.append(log_b[: len(target)].gather(1, target)[:, 0])
    parts = {"kl": kl, "logprob_a": logprob_a, "logprob_b": logprob_b}
    return {name: torch.cat(part).numpy() for name, part in parts.items()}


def format_comparison(result: Comparison) -> str:
    """For people: one table of stretches, one of layers."""
    summary = result.summary()
    lines = [
        f"a: {result.a or 'defaults'}    b: {result.b or 'defaults'}",
        f"{summary['length']:,} tokens, {result.chunk:,} a step",
        f"KL(a ‖ b): mean {summary['kl_mean']:.3g}, largest {summary['kl_max']:.3g} nats, at {summary['kl_max_position']:,}",
        f"same most likely token: {summary['agreement']:.2%}",
        f"nats a token: a {summary['nll_a']:.5f}, b {summary['nll_b']:.5f}",
        "",
        "| tokens | mean KL | largest KL | same token | relative RMSE of the last layer |",
        "| --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    edges = result.edges[:: max(1, (len(result.edges) - 1) // 8)]
    for first, last in zip(edges[:-1], edges[1:], strict=True):
        kl = result.kl[first:last]
        lines.append(
            f"| {first:,}–{last - 1:,} | {kl.mean():.3g} | {kl.max():.3g} | {result.agrees[first:last].mean():.2%} | "
            f"{result.relative_rmse(first, last)[-1]:.3g} |"
        )
    lines += ["", "| layer | relative RMSE |", "| --- | --- |"]
    lines += [f"| {number} | {value:.3g} |" for number, value in enumerate(summary["relative_rmse"])]
    return "\n".join(lines)


def drift_plot(result: Comparison) -> str:
    """Relative RMSE of every layer's output over the position, as SVG."""
    stretches = list(zip(result.edges[:-1], result.edges[1:], strict=True))
    middle = [(first + last) / 2 for first, last in stretches]
    values = np.array([result.relative_rmse(first, last) for first, last in stretches])
    series = [Series(f"layer {number}", middle, layer) for number, layer in enumerate(values.T)]
    return line_plot("Divergence of the layers' outputs", "position", "relative RMSE", series, log_y=True)


def kl_plot(result: Comparison) -> str:
    """KL of the outputs over the position, mean and largest of each stretch, as SVG."""
    stretches = list(zip(result.edges[:-1], result.edges[1:], strict=True))
    middle = [(first + last) / 2 for first, last in stretches]
    series = [
        Series("mean", middle, [result.kl[first:last].mean() for first, last in stretches]),
        Series("largest", middle, [result.kl[first:last].max() for first, last in stretches]),
    ]
    return line_plot("KL of the next-token distributions", "position", "nats", series, log_y=True)


def comparison_page(result: Comparison) -> str:
    """A self-contained HTML page."""
    summary = result.summary()
    words = (
        f"a: {result.a or 'defaults'}; b: {result.b or 'defaults'}; {summary['length']:,} tokens, {result.chunk:,} a step. "
        f"Mean KL {summary['kl_mean']:.3g} nats, largest {summary['kl_max']:.3g} at token {summary['kl_max_position']:,}; "
        f"the same most likely token in {summary['agreement']:.2%}; "
        f"nats a token {summary['nll_a']:.5f} and {summary['nll_b']:.5f}."
    )
    layers = [[str(number), f"{value:.3g}"] for number, value in enumerate(summary["relative_rmse"])]
    sections = [f"<p>{escape(words)}</p>", drift_plot(result), kl_plot(result), table(["layer", "relative RMSE"], layers)]
    return page("Two configurations compared", sections)
