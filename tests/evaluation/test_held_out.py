"""Text that the tiny checkpoint was not trained on, in lm-eval: the figures and the log-likelihoods of lm-eval's own model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
COMPARED = 12
"""Documents of four requests whose log-likelihoods are compared one by one."""


@pytest.fixture(scope="module")
def results(tiny_folder, tmp_path_factory):
    """What the command writes for both tasks. In a process of its own, with a graph optimized as it is for users."""
    output = tmp_path_factory.mktemp("held_out") / "results.json"
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "CPU_NUM_DEVICES")}
    command = [
        sys.executable, "-m", "torchqwen_tpu.cli", "evaluate", "--model", tiny_folder, "--dtype", "float32",
        "--tasks", "next_line,held_ppl", "--include-path", "examples/held_out", "--max-length", "2048",
        "--output", output, "--log-samples",
    ]  # fmt: skip
    process = subprocess.run([str(part) for part in command], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-4000:]
    return json.loads(output.read_text())


def test_figures_of_the_tasks(results):
    next_line, held_ppl = results["results"]["next_line"], results["results"]["held_ppl"]
    assert round(next_line["acc,none"], 4) == 0.5292 and round(next_line["acc_norm,none"], 4) == 0.5333
    assert round(held_ppl["bits_per_byte,none"], 4) == 1.1686


def test_log_likelihoods_of_next_lines(results, tiny_reference, tokenizer):
    theirs = HFLM(tiny_reference, tokenizer=tokenizer, batch_size=8, max_length=2048, device="cpu")
    samples = [sample for sample in results["samples"]["next_line"] if sample["doc_id"] < COMPARED]
    for sample in samples:
        texts = [(sample["doc"]["context"], choice) for choice in sample["doc"]["choices"]]
        requests = [Instance("loglikelihood", sample["doc"], pair, number) for number, pair in enumerate(texts)]
        for (found, greedy), (expected, expected_greedy) in zip(
            sample["filtered_resps"], theirs.loglikelihood(requests, disable_tqdm=True), strict=True
        ):
            assert float(found) == pytest.approx(expected, abs=1e-3) and str(greedy) == str(expected_greedy)
