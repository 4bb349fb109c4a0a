"""What is asked of a plan, and the graphs that answer it."""

from __future__ import annotations

from dataclasses import dataclass

from torchqwen_tpu.batch import bucket
from torchqwen_tpu.config import LAYOUTS

DTYPES = ("bf16", "fp8")
KV_DTYPES = {"bf16": "bfloat16", "fp8": "float8_e4m3fn"}
"""What `RuntimeConfig` calls the dtypes of KV pages."""


@dataclass(frozen=True)
class PlanRequest:
    """A model on a topology under a load.

    Args:
        model: folder with a config.json, that file itself, or a model id of the hub.
        topology: as libtpu names it: 'tpu7x:2x2x1' (chips along each axis).
        concurrency: sequences at once, over all devices.
        input_len, output_len: tokens of each.
        layout: 'dp', 'dp_tp', 'tp', or 'auto' for all that the model's heads allow.
        dtype: of the weights, 'bf16' or 'fp8' (what the published FP8 checkpoints quantise, the rest and the activations BF16).
        state_dtype: of the recurrent states.
        kv_dtype: of the KV pages, 'bf16' or 'fp8'.
        page_size: tokens a KV page.
        prefill_chunk: the most tokens a rank takes in one step.

    Raises:
        ValueError: naming what cannot be.
    """

    model: str
    topology: str = "tpu7x:2x2x1"
    concurrency: int = 64
    input_len: int = 8192
    output_len: int = 1024
    layout: str = "dp"
    dtype: str = "bf16"
    state_dtype: str = "bfloat16"
    kv_dtype: str = "bf16"
    page_size: int = 256
    prefill_chunk: int = 4096

    def __post_init__(self) -> None:
        for name in ("concurrency", "input_len", "output_len", "prefill_chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.layout not in (*LAYOUTS, "auto"):
            raise ValueError(f"layout must be one of {', '.join(LAYOUTS)} or auto, not {self.layout!r}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, not {self.dtype!r}")
        if self.kv_dtype not in KV_DTYPES:
            raise ValueError(f"kv_dtype must be one of {', '.join(KV_DTYPES)}, not {self.kv_dtype!r}")

    @property
    def total_len(self) -> int:
        return self.input_len + self.output_len


@dataclass(frozen=True)
class Graph:
    """One compiled step of a layout.

    Args:
        weights: 'bf16' or 'fp8'.
        tokens: of a rank in one step; None for the decode loop.
        decode_steps: decode steps in one run of the graph.
        candidates: that sampling sorts.
    """

    topology: str
    chips: int
    cores: int
    layout: str
    weights: str
    state_dtype: str
    kv_dtype: str
    page_size: int
    prefill_chunk: int
    sequences: int
    tokens_per_sequence: int
    tokens: int | None = None
    decode_steps: int = 8
    candidates: int = 0


def graphs(request: PlanRequest, layout: str, chips: int, cores: int, ranks: int) -> dict[str, Graph]:
    """The graphs of a layout by name: 'extend' (prefill chunks, and those with decoding sequences beside) and 'decode'."""
    rows = -(-request.concurrency // ranks)
    tokens = bucket(min(request.prefill_chunk, rows * request.input_len), 64)
    common = {
        "topology": request.topology, "chips": chips, "cores": cores, "layout": layout, "weights": request.dtype,
        "state_dtype": request.state_dtype, "kv_dtype": request.kv_dtype,
        "page_size": request.page_size, "prefill_chunk": request.prefill_chunk,
        "sequences": request.concurrency, "tokens_per_sequence": request.total_len,
    }  # fmt: skip
    return {"extend": Graph(**common, tokens=tokens), "decode": Graph(**common)}
