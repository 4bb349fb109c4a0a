"""What a numerical watch costs: the same steps with and without it, in turn.

    python -m torchqwen_tpu.monitoring.benchmark --model M [--rounds 10] [--every N]

Prefill is 512 tokens of one sequence, decode 32 tokens of 8 and of 64 sequences. The cost is that of the cheapest round over
that of the cheapest without a watch, by the clock and by processor time. With `--every` a round is that many runs.
"""

from __future__ import annotations

import argparse
import contextlib
import time
import warnings
from collections.abc import Callable

import numpy as np
import torch

from torchqwen_tpu.commands.arguments import load_model, model_arguments, positive
from torchqwen_tpu.models.causal_lm import CausalLM
from torchqwen_tpu.monitoring import Limits, NumericalWarning, Watch

PREFILL_TOKENS, DECODE_TOKENS, PROMPT_TOKENS = 512, 32, 4


def runs(model: CausalLM) -> dict[str, Callable[[], object]]:
    """What is measured, by name."""
    generator = torch.Generator().manual_seed(0)

    def ids(rows: int, tokens: int) -> torch.Tensor:
        return torch.randint(1, model.vocab_size, (rows, tokens), generator=generator)

    def decode(rows: int) -> Callable[[], object]:
        prompts = ids(rows, PROMPT_TOKENS)
        options = {"max_new_tokens": DECODE_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        return lambda: model.generate(prompts, attention_mask=torch.ones_like(prompts), **options)

    text = ids(1, PREFILL_TOKENS)
    return {
        f"prefill of {PREFILL_TOKENS} tokens": lambda: model(text, logits_to_keep=1).logits.cpu(),
        "decode of 8 sequences": decode(8),
        "decode of 64 sequences": decode(64),
    }


def measure(run: Callable[[], object], watch: Watch, rounds: int) -> np.ndarray:
    """[rounds, (without, with the watch), (seconds, processor seconds)]."""
    times = []
    for number in range(rounds + 1):
        pair = []
        for context in (contextlib.nullcontext(), watch):
            started = time.perf_counter(), time.process_time()
            with context:
                for _ in range(watch.every):
                    run()
            pair.append((time.perf_counter() - started[0], time.process_time() - started[1]))
        if number:  # the first round compiles
            times.append(pair)
    return np.array(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], parents=[model_arguments("float32")])
    parser.add_argument("--rounds", type=positive, default=10, metavar="N", help="default: %(default)s")
    parser.add_argument("--every", type=positive, default=1, metavar="N", help="what the watch looks at (default: every step)")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", NumericalWarning)  # random tokens are no text, and load the experts unevenly
    model = load_model(arguments)
    watch = Watch(model, Limits(), None, arguments.every)
    for name, run in runs(model).items():
        times = measure(run, watch, arguments.rounds)
        (off, off_cpu), (on, on_cpu) = times.min(0)
        print(
            f"{name}: {1e3 * off:.1f} ms, watched {1e3 * on:.1f} ({on / off - 1:+.1%}); "
            f"of processor time {1e3 * off_cpu:.1f} and {1e3 * on_cpu:.1f} ms ({on_cpu / off_cpu - 1:+.1%})",
            flush=True,
        )


if __name__ == "__main__":
    main()
