"""Published timings that plans are held against: Google's Qwen 3.5-397B-A17B in FP8 on one VM of Ironwood (July and August
2026), and operations of the same work (pull requests of github.com/vllm-project/tpu-inference)."""

from __future__ import annotations

from custom_ops.cost_model import Links
from custom_ops.ragged_moe.schedule_cases import PUBLISHED
from torchqwen_tpu.planning.result import Plan

DECODE_STEP = 16.36e-3
DECODE_ROOFLINE = (12.6e-3, 14.5e-3)
"""Google's own, at peak and at measured bandwidth."""
THROUGHPUT = {(8192, 1024): (3707, 4945), (1024, 8192): (677, 795)}
"""Input and output tokens → tokens a second and chip, in July and in August."""
HOST = Links(8, 4, (2, 2))
COLLECTIVES = (
    ("all-gather of 8,192 × 4,096 in BF16, 8 cores", "all-gather", 8192 * 4096 * 2, 559e-6),
    ("all-gather of 8,192 × 4,096 in FP8, 8 cores", "all-gather", 8192 * 4096, 283e-6),
)
"""The number of rows is our inference: it is not stated."""

EXPERTS = {tokens: tuple(1e-6 * time for time in times) for tokens, times in PUBLISHED.items()}
"""A layer's experts, FP8 on eight cores: tokens → in production, best known."""
GATED_DELTA_NET = {64: 36.7e-6, 128: 66.6e-6, 256: 126e-6, 512: 239e-6}
"""The decode kernel alone, by sequences; the layout and the states' type are not stated."""
GATED_DELTA_NET_GAIN = 1.41
"""By how much a later version of that kernel is faster."""

Row = tuple[str, str, str, float]
"""What, published, modelled, relative difference."""
LEFT_OUT = (
    "The model leaves out the host, uneven routing and cores that wait for the slowest one: besides decode steps it counts "
    "prefill alone, the published runs everything there was."
)


def comparisons(plan: Plan) -> list[Row]:
    """Rows for a plan of 397B in FP8 for 64 requests on tpu7x:2x2x1, else none.

    The last one is what the tokens/s leave for other things than decode steps, by the decode step of the same column.
    """
    request, best = plan.request, plan.best
    published = THROUGHPUT.get((request.input_len, request.output_len))
    machine = (request.topology, request.concurrency, request.dtype)
    if machine != ("tpu7x:2x2x1", 64, "fp8") or not published or not best.steps:
        return []
    if not 390e9 < sum(plan.parameters.values()) < 400e9:
        return []
    rows = []
    step, bound = best.time_per_output_token, best.steps["decode, start"].roofline
    rows.append(("decode step", f"{1e3 * DECODE_STEP:.2f} ms", f"{1e3 * step:.2f} ms", step / DECODE_STEP - 1))
    for name, theirs, ours in (
        ("roofline of decode, peak", DECODE_ROOFLINE[0], bound.peak),
        ("roofline of decode, measured bandwidth", DECODE_ROOFLINE[1], bound.derated),
    ):
        rows.append((name, f"{1e3 * theirs:.1f} ms", f"{1e3 * ours:.1f} ms", ours / theirs - 1))
    ours = best.tokens_per_second_chip["mixed"]
    for when, theirs in zip(("July", "August"), published, strict=True):
        rows.append((f"tokens/s/chip, {when}", f"{theirs:,}", f"{ours:,.0f}", ours / theirs - 1))
    each = request.concurrency * request.total_len / plan.chips
    theirs, ours = each / published[-1] - request.output_len * DECODE_STEP, each / ours - request.output_len * step
    rows.append(("besides decode steps, August", f"{theirs:.1f} s", f"{ours:.1f} s", ours / theirs - 1))
    return rows
