"""Prefill of Gated DeltaNet beside the fallback of transformers, in turn in one process.

    python -m custom_ops.gated_delta_net.benchmark [--tokens 4096] [--pairs 5]

Both take projected tokens of one sequence in float32 through convolution, gates and delta rule to output and final
state, at the head sizes of the tiny model.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
import torch_xla
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import causal_conv1d_fn, torch_chunk_gated_delta_rule

from custom_ops.bridge import JaxOp, current_platform
from custom_ops.gated_delta_net import GatedDeltaNetShape
from custom_ops.implementations import implementation

SHAPE = GatedDeltaNetShape(key_heads=2, value_heads=8, key_dim=64, value_dim=64)
WIDTH = 4


def fallback(qkv, b, a, conv_weight, A_log, dt_bias) -> tuple[torch.Tensor, torch.Tensor]:
    """transformers' layer between its projections: output [tokens, value heads, value dim] and state of the value heads."""
    keys, by_head = SHAPE.key_heads * SHAPE.key_dim, (1, len(qkv), -1, SHAPE.key_dim)
    mixed = causal_conv1d_fn(qkv.t()[None], conv_weight.t(), None, activation="silu").transpose(1, 2)
    query, key, value = mixed.split([keys, keys, SHAPE.value_heads * SHAPE.value_dim], dim=-1)
    output, state = torch_chunk_gated_delta_rule(
        query.reshape(by_head), key.reshape(by_head), value.reshape(1, len(qkv), -1, SHAPE.value_dim),
        g=(-A_log.exp() * F.softplus(a + dt_bias))[None], beta=b.sigmoid()[None],
        output_final_state=True, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    return output[0], state[0]


def ours(qkv, b, a, conv_weight, A_log, dt_bias) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """The same with channels as this package orders them, on the device, ready to run."""
    op = JaxOp("gated_delta_net", implementation("gated_delta_net", current_platform()), (("shape", SHAPE),))
    order = SHAPE.published_channels()
    metadata = (torch.tensor([value], dtype=torch.int32) for value in (0, len(qkv), 0, 0))
    states = torch.zeros(1, WIDTH - 1, SHAPE.channels), torch.zeros(1, SHAPE.value_heads, SHAPE.key_dim, SHAPE.value_dim)
    arguments = (qkv[:, order], b, a, conv_weight[:, order], A_log, dt_bias, *metadata, *states)
    arguments = [tensor.to("xla") for tensor in arguments]

    def run():
        output, _, state = op(*arguments)
        torch_xla.sync()
        return output.cpu(), state.cpu()[0]  # waits for them

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--pairs", type=int, default=5, help="measurements of each")
    options = parser.parse_args()

    torch.manual_seed(0)
    heads = SHAPE.value_heads
    arguments = (
        torch.randn(options.tokens, SHAPE.channels), torch.randn(options.tokens, heads), torch.randn(options.tokens, heads),
        torch.randn(WIDTH, SHAPE.channels) / 2, torch.randn(heads) / 2 - 1, torch.randn(heads),
    )  # fmt: skip
    runs = {"ours": ours(*arguments), "transformers": torch.no_grad()(functools.partial(fallback, *arguments))}
    results = {name: run() for name, run in runs.items()}  # compiles
    for result, expected in zip(*results.values(), strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-3, atol=1e-4)

    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(options.pairs):
        for name, run in runs.items():
            begin = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - begin)
    for name, times in seconds.items():
        print(f"{name}: {statistics.median(times) * 1e3:.1f} ms for {options.tokens} tokens")
    ratios = [theirs / own for own, theirs in zip(*seconds.values(), strict=True)]
    print(f"ratio: {statistics.median(ratios):.1f} ({min(ratios):.1f} to {max(ratios):.1f})")


if __name__ == "__main__":
    main()
