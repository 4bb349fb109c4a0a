"""lm-eval's accuracy in choosing the next line of a file, of the FP8 checkpoint under each policy against the BF16 one."""

from __future__ import annotations

import json

import pytest
from checkpoints import load
from conftest import TINY
from transformers import AutoTokenizer

from torchqwen_tpu import RuntimeConfig
from torchqwen_tpu.config import QUANTIZATIONS

pytest.importorskip("lm_eval")

from torchqwen_tpu.evaluation.tasks import evaluate  # noqa: E402

TASK = {
    "task": "held_out_next_line", "dataset_path": "json", "test_split": "train", "output_type": "multiple_choice",
    "doc_to_text": "{{context}}", "doc_to_choice": "{{choices}}", "doc_to_target": "{{label}}", "target_delimiter": "",
    "metric_list": [{"metric": "acc"}],
    "dataset_kwargs": {"data_files": str(TINY.parent / "held_out" / "next_line.jsonl")},
}  # fmt: skip


@pytest.fixture(scope="module")
def accuracy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "task.yaml").write_text(json.dumps(TASK))  # JSON is YAML

    def measured(model) -> tuple[float, float]:
        """Accuracy, and its standard error."""
        tokenizer = AutoTokenizer.from_pretrained(TINY)
        results = evaluate(model, tokenizer, [TASK["task"]], include_path=str(folder), max_length=2048, limit=24)
        own = results["results"][TASK["task"]]
        return own["acc,none"], own["acc_stderr,none"]

    return measured


@pytest.fixture(scope="module")
def bf16(accuracy) -> tuple[float, float]:
    return accuracy(load(TINY))


@pytest.mark.slow
@pytest.mark.parametrize("policy", QUANTIZATIONS)
def test_within_a_standard_error(accuracy, bf16, policy):
    model = load(TINY.with_name("tiny-qwen3.5-moe-fp8"), runtime=RuntimeConfig(quantization=policy))
    result, _ = accuracy(model)
    expected, error = bf16
    assert expected > 0.5 and 0.05 < error < 0.15  # chance is 0.25, of 24 documents
    assert abs(result - expected) <= error
