"""Choices of the true next line of a file, in inspect-ai (`pip install -e '.[inspect]'`), on text that the model has not
seen: 24 of them.

Expected output:

    accuracy 0.7083
"""

import json
import tempfile
from pathlib import Path

from inspect_ai import Task, eval, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import get_model
from inspect_ai.scorer import choice

from torchqwen_tpu.evaluation.inspect_model import most_likely_choice

EXAMPLES = Path(__file__).parent


@task
def next_line() -> Task:
    lines = map(json.loads, (EXAMPLES / "held_out" / "next_line.jsonl").read_text().splitlines())
    samples = [Sample(input=line["context"], choices=line["choices"], target="ABCD"[line["label"]]) for line in lines]
    return Task(dataset=MemoryDataset(samples), solver=most_likely_choice(), scorer=choice())


model = get_model(f"torchqwen/{EXAMPLES / 'tiny-qwen3.5-moe'}", chat_template=False)
with tempfile.TemporaryDirectory() as folder:
    (log,) = eval(next_line(), model=model, limit=24, log_dir=folder, display="none")
if log.status != "success":
    raise SystemExit(log.error.message)
print(f"accuracy {log.results.scores[0].metrics['accuracy'].value:.4f}")
