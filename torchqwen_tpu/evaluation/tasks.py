"""lm-eval's tasks on a model."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from torchqwen_tpu.models.causal_lm import CausalLM

MISSING = "evaluate needs lm-eval: pip install 'torchqwen-tpu[eval]'"


def check_tasks(tasks: list[str], include_path: str | None) -> None:
    """Raise ValueError where lm-eval is missing, or where it knows no such task: before a model is loaded."""
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError(MISSING)
    from lm_eval.tasks import TaskManager

    if include_path is not None and not Path(include_path).is_dir():
        raise ValueError(f"there is no folder {include_path}; --include-path names one with task files")
    manager = TaskManager(include_path=include_path)
    unknown = [task for task in tasks if not manager.match_tasks([task])]
    if unknown:
        raise ValueError(f"lm-eval knows no task {', '.join(unknown)}; --include-path adds a folder of task files")


def evaluate(
    model: CausalLM,
    tokenizer: PreTrainedTokenizerBase,
    tasks: list[str],
    *,
    include_path: str | None = None,
    num_fewshot: int | None = None,
    batch_size: int | str = "auto",
    limit: int | None = None,
    max_length: int | None = None,
    log_samples: bool = False,
) -> dict:
    """What `lm_eval.simple_evaluate` returns for these tasks."""
    from torchqwen_tpu.evaluation.lm_eval_model import TorchQwenLM

    return run_tasks(
        TorchQwenLM(model, tokenizer, batch_size=batch_size, max_length=max_length),
        tasks,
        include_path=include_path,
        num_fewshot=num_fewshot,
        limit=limit,
        log_samples=log_samples,
    )


def run_tasks(model, tasks: list[str], *, include_path: str | None = None, log_samples: bool = False, **options) -> dict:
    """`lm_eval.simple_evaluate` of any model that lm-eval takes, with task files of a folder; `options` are its own."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=include_path)
    return lm_eval.simple_evaluate(model, tasks=tasks, task_manager=manager, log_samples=log_samples, **options)


def format_results(results: dict) -> str:
    """The table that lm-eval prints."""
    from lm_eval.utils import make_table

    return make_table(results)


def write_results(results: dict, file: Path) -> None:
    """Everything as JSON, in the form of lm-eval's own result files."""
    from lm_eval.utils import handle_non_serializable

    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(results, indent=2, default=handle_non_serializable, ensure_ascii=False) + "\n")
