"""What is asked of a plan, and the graphs that answer it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torchqwen_tpu.batch import bucket
from torchqwen_tpu.cache import DEFAULT_PAGE_SIZE
from torchqwen_tpu.config import EngineConfig, RuntimeConfig
from torchqwen_tpu.parallel.mesh import DeviceMesh
from torchqwen_tpu.planning.layouts import is_layout

DTYPES = ("bf16", "fp8")
SMALLEST_STEP = 64
"""Tokens of the smallest prefill step that is planned."""
KV_DTYPES = {"bf16": "bfloat16", "fp8": "float8_e4m3fn"}
"""What `RuntimeConfig` calls the dtypes of KV pages."""


@dataclass(frozen=True)
class PlanRequest:
    """A model on a topology under a load. What is not given is what an `Engine` takes by default.

    Args:
        model: folder with a config.json, that file itself, or a model id of the hub.
        topology: as libtpu names it: 'tpu7x:2x2x1' (chips along each axis).
        concurrency: sequences at once, over all devices.
        input_len, output_len: tokens of each.
        layout: 'dp', 'dp_tp' or 'tp', also with the sizes that they have on the topology ('dp8', 'dp4tp2', 'tp8'), or 'auto'
            for all of them.
        dtype: of the weights, 'bf16' or 'fp8' (what the published FP8 checkpoints quantise, the rest and the activations BF16).
        state_dtype: of the recurrent states.
        kv_dtype: of the KV pages, 'bf16' or 'fp8'.
        page_size: tokens a KV page.
        prefill_chunk: the most tokens a rank takes in one step.
        watched: whether a numerical watch looks at every step.

    Raises:
        ValueError: naming what cannot be.
    """

    model: str
    topology: str = "tpu7x:2x2x1"
    concurrency: int = EngineConfig.max_sequences
    input_len: int = 8192
    output_len: int = 1024
    layout: str = "dp"
    dtype: str = "bf16"
    state_dtype: str = RuntimeConfig.state_dtype
    kv_dtype: str = "bf16"
    page_size: int = DEFAULT_PAGE_SIZE["TPU"]
    prefill_chunk: int = EngineConfig.token_budget
    watched: bool = False

    def __post_init__(self) -> None:
        for name in ("concurrency", "input_len", "output_len", "prefill_chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not is_layout(self.layout):
            raise ValueError(f"layout must be dp, dp_tp, tp, one with its sizes such as dp4tp2, or auto, not {self.layout!r}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, not {self.dtype!r}")
        if self.kv_dtype not in KV_DTYPES:
            raise ValueError(f"kv_dtype must be one of {', '.join(KV_DTYPES)}, not {self.kv_dtype!r}")
        RuntimeConfig(page_size=self.page_size, state_dtype=self.state_dtype)  # refuses what does not run

    @property
    def model_name(self) -> str:
        """What a reader calls the model."""
        path = Path(self.model)
        if path.name == "config.json":
            path = path.parent
        return path.resolve().name.removesuffix(".json")

    @property
    def total_len(self) -> int:
        return self.input_len + self.output_len


@dataclass(frozen=True)
class Graph:
    """One compiled step of a layout.

    Args:
        config: path of the model's config.json.
        key_value_copies: of every key-value head, see `layouts.key_value_copies`.
        weights: 'bf16' or 'fp8'.
        tokens: of a rank in one step; None for the decode loop.
        decode_steps: decode steps in one run of the graph.
        candidates: that sampling sorts.
        watched: whether a numerical watch looks at the step.
    """

    config: str
    topology: str
    chips: int
    cores: int
    layout: str
    key_value_copies: int
    weights: str
    state_dtype: str
    kv_dtype: str
    page_size: int
    sequences: int
    tokens_per_sequence: int
    tokens: int | None = None
    decode_steps: int = RuntimeConfig.decode_steps
    candidates: int = 0
    watched: bool = False

    module = "torchqwen_tpu.planning.child"

    @property
    def devices(self) -> int:
        return self.chips * self.cores


def graphs(request: PlanRequest, config: Path, mesh: DeviceMesh, key_value_copies: int = 1) -> dict[str, Graph]:
    """The graphs of a layout by name: 'extend' (prefill chunks, and those with decoding sequences beside) and 'decode'."""
    rows = -(-request.concurrency // mesh.ranks)
    tokens = bucket(min(request.prefill_chunk, rows * request.input_len), SMALLEST_STEP)
    common = {
        "config": str(config), "topology": request.topology, "chips": mesh.chips, "cores": mesh.cores, "layout": mesh.layout,
        "key_value_copies": key_value_copies, "weights": request.dtype, "state_dtype": request.state_dtype,
        "kv_dtype": request.kv_dtype, "page_size": request.page_size, "sequences": request.concurrency,
        "tokens_per_sequence": request.total_len, "watched": request.watched,
    }  # fmt: skip
    return {"extend": Graph(**common, tokens=tokens), "decode": Graph(**common)}
