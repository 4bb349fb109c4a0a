"""Qwen 3.5 on TPUs with PyTorch/XLA, as transformers' users know it."""

from torchqwen_tpu import monitoring
from torchqwen_tpu.auto import AutoModelForCausalLM, register
from torchqwen_tpu.cache import HybridCache
from torchqwen_tpu.config import EngineConfig, ParallelConfig, RuntimeConfig
from torchqwen_tpu.evaluation import score
from torchqwen_tpu.models.causal_lm import Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM
from torchqwen_tpu.planning import plan
from torchqwen_tpu.runtime.engine import Engine

__version__ = "0.1.0"

__all__ = [
    "AutoModelForCausalLM",
    "Engine",
    "EngineConfig",
    "HybridCache",
    "ParallelConfig",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
    "RuntimeConfig",
    "monitoring",
    "plan",
    "register",
    "score",
]
