"""The only switches: how a model is laid out over devices, and how it runs."""

from __future__ import annotations

from dataclasses import dataclass, field

LAYOUTS = ("dp", "dp_tp", "tp")
WIRES = ("int8", "float8_e4m3fn", "bfloat16")
KV_DTYPES = ("auto", "bfloat16", "float8_e4m3fn")
QUANTIZATIONS = ("keep", "channel", "dequantize")


@dataclass(frozen=True)
class ParallelConfig:
    """How a model is laid out over a mesh of chips × cores. Experts are always split over all devices.

    Args:
        chips: chips in the mesh; None takes all that are attached (on a CPU: one).
        cores: cores a chip; None takes what the chip has (TPU7x: two; CPU: one).
        layout: which axis the tokens and the attention heads are split over:
            "dp" – every core owns whole requests (best from some 64 requests at once);
            "dp_tp" – every chip owns whole requests, its cores share the heads (16 to 32 requests);
            "tp" – all devices share the heads of every request (a few requests).

    On a CPU any mesh may be asked for: torch_xla then runs that many virtual devices.
    """

    chips: int | None = None
    cores: int | None = None
    layout: str = "dp"

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, not {self.layout!r}")
        for name in ("chips", "cores"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} must be a positive integer, not {value!r}")


@dataclass(frozen=True)
class EngineConfig:
    """How an `Engine` serves requests.

    Args:
        max_sequences: the most requests that run at once, over all data-parallel ranks; the others wait.
        max_length: the most tokens of a request; None for the model's limit, or for what the pages hold if that is less.
        token_budget: the most tokens of a rank's prefill step.
        cache_memory: bytes a device for pages, states and checkpoints, or (at most 1) a share of the memory that is
            free; None takes 0.9 on a TPU and 1 GiB on a CPU.
        pages: KV pages a rank, in place of `cache_memory`.
        checkpoints: prefixes a rank whose recurrent states are kept for later requests; None for as many as it has
            sequences, 0 for no reuse of prefixes.
        mixed: decoding requests take part in prefill steps. None: on a TPU, where a prefill step reads the weights
            anyway, but not on a CPU, where its tiles make a single token expensive.
    """

    max_sequences: int = 64
    max_length: int | None = None
    token_budget: int = 1024
    cache_memory: int | float | None = None
    pages: int | None = None
    checkpoints: int | None = None
    mixed: bool | None = None

    def __post_init__(self) -> None:
        for name in ("max_sequences", "max_length", "token_budget", "pages"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} must be an integer of at least 1, not {value!r}")
        if self.checkpoints is not None and self.checkpoints < 0:
            raise ValueError(f"checkpoints must be at least 0, not {self.checkpoints}")
        if self.cache_memory is not None and self.cache_memory <= 0:
            raise ValueError(f"cache_memory must be bytes or a share of the free memory, not {self.cache_memory!r}")


@dataclass(frozen=True)
class RuntimeConfig:
    """How a model runs.

    Args:
        page_size: tokens a KV page holds; None takes 256 on a TPU and 64 on a CPU.
        state_dtype: storage of the recurrent states, "float32" or "bfloat16"; arithmetic is float32 either way.
        kv_dtype: storage of keys and values, "auto" (the model's dtype), "bfloat16", or "float8_e4m3fn": half the memory of
            bfloat16, with a float32 scale for each token and head of keys and of values.
        prefill_chunk: the most tokens that a data-parallel rank takes in one step; longer inputs take several steps.
        decode_steps: decode steps that run on the device before the host looks at the result.
        scan_layers: stack the weights of layers that repeat with a period and run the periods in a loop, so that tracing,
            compiling and arguments do not grow with depth; None takes the loop on a TPU. On a CPU it copies every layer's
            weights and pays from some dozens of layers of a small model.
        round_router: round router logits and weights to the model's dtype as transformers does. Off, routing stays in
            float32: more exact, and different from transformers in bfloat16.
        moe_wire: dtype in which tokens go to the experts, in every layout: "int8" (with a scale for each 128 columns),
            "float8_e4m3fn" (a scale a token: as many bytes, four times the rounding error) or "bfloat16". None takes the
            model's own, and on a TPU int8 for a bfloat16 model whose experts are FP8.
        moe_micro_batches: parts that the tokens of a step take through the experts one after the other, so that one part
            travels while another is computed; fewer where a rank's tokens do not divide by it. None takes, on a TPU, what a
            model of the machine's time says, and elsewhere one.
        quantization: what becomes of the FP8 weights of a checkpoint (others stay as they are):
            "keep" – the same FP8 numbers and scales of blocks, multiplied in the model's dtype;
            "channel" – FP8 anew, one scale an output channel, which adds rounding (reported by kind of weight); a TPU
            multiplies FP8 by FP8, each token quantised too;
            "dequantize" – the model's dtype, twice the memory or four times.
            None takes "channel" on a TPU and "dequantize" on a CPU, which has no product of FP8.
        implementations: implementation by operation, for example {"gated_delta_net": "reference"}; operations that
            are not named take the platform's default.
    """

    page_size: int | None = None
    state_dtype: str = "float32"
    kv_dtype: str = "auto"
    prefill_chunk: int = 4096
    decode_steps: int = 8
    scan_layers: bool | None = None
    round_router: bool = False
    moe_wire: str | None = None
    moe_micro_batches: int | None = None
    quantization: str | None = None
    implementations: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.page_size not in (None, 16, 32, 64, 128, 256):
            raise ValueError(f"page_size must be 16, 32, 64, 128 or 256, not {self.page_size}")
        if self.state_dtype not in ("float32", "bfloat16"):
            raise ValueError(f"state_dtype must be float32 or bfloat16, not {self.state_dtype!r}")
        if self.kv_dtype not in KV_DTYPES:
            raise ValueError(f"kv_dtype must be one of {', '.join(KV_DTYPES)}, not {self.kv_dtype!r}")
        if self.moe_wire not in (None, *WIRES):
            raise ValueError(f"moe_wire must be {' or '.join(WIRES)}, not {self.moe_wire!r}")
        if self.quantization not in (None, *QUANTIZATIONS):
            raise ValueError(f"quantization must be one of {', '.join(QUANTIZATIONS)}, not {self.quantization!r}")
        for name in ("prefill_chunk", "decode_steps", "moe_micro_batches"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
