"""Helpers of the tests: random checkpoints made by transformers, padded batches, and the unpadded answers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import Qwen3_5MoeTextConfig, Qwen3_5TextConfig

TOLERANCE = 1e-4
"""Largest difference of float32 logits from transformers'."""
PROMPT_LENGTHS = (1, 2, 3, 4, 5, 37, 63, 64, 65, 700)
"""Lengths at which the trained checkpoint is compared; the first eight fit one bucket."""
_SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
}
_MOE_SIZES = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 32,
}


def moe_config(**changes) -> Qwen3_5MoeTextConfig:
    return Qwen3_5MoeTextConfig(**{**_SIZES, **_MOE_SIZES, **changes})


def dense_config(**changes) -> Qwen3_5TextConfig:
    return Qwen3_5TextConfig(**{**_SIZES, "intermediate_size": 96, **changes})


def save_random(config, folder: Path, seed: int = 0) -> Path:
    """A random model of transformers in a folder; no norm, decay or bias has the value that training starts from."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("dt_bias"):
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif name.endswith("A_log"):
                parameter.copy_(torch.randn_like(parameter) - 1)
    model.save_pretrained(folder)
    return folder


def reference_of(folder: Path, dtype: torch.dtype = torch.float32, **kwargs):
    """The checkpoint in transformers."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **kwargs).eval()


def random_rows(lengths, vocabulary: int = _SIZES["vocab_size"], seed: int = 0) -> list[list[int]]:
    """Token ids of sequences of these lengths; none is 0, which the tests pad with."""
    generator = np.random.default_rng(seed)
    return [generator.integers(1, vocabulary, length).tolist() for length in lengths]


def padded(rows, side: str = "left", columns: int = 0, pad: int = 0) -> dict[str, torch.Tensor]:
    """input_ids and attention_mask of rows padded on one side."""
    columns = max(columns, *map(len, rows))
    ids = torch.full((len(rows), columns), pad)
    mask = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        where = slice(columns - len(row), columns) if side == "left" else slice(0, len(row))
        ids[number, where], mask[number, where] = torch.tensor(row), 1
    return {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
def reference_logits(reference, row, **kwargs) -> torch.Tensor:
    """transformers' logits of one sequence without padding, [tokens, vocabulary]."""
    return reference(torch.tensor([row]), **kwargs).logits[0]


def reference_tokens(reference, row, new_tokens: int, **kwargs) -> list[int]:
    """What transformers generates greedily after one sequence without padding."""
    ids = torch.tensor([row])
    sequence = reference.generate(ids, max_new_tokens=new_tokens, **{"do_sample": False, **kwargs})
    return sequence[0, len(row) :].tolist()


def assert_rows_match(logits: torch.Tensor, mask: torch.Tensor, expected: list[torch.Tensor]) -> None:
    """Logits of a padded batch equal those of every sequence alone."""
    for number, want in enumerate(expected):
        torch.testing.assert_close(logits[number][mask[number].bool()].cpu(), want, atol=TOLERANCE, rtol=0)
