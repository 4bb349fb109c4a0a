"""lm-eval's tasks on a model."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from torchqwen_tpu.models.causal_lm import CausalLM

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

MISSING = "evaluate needs lm-eval: pip install 'torchqwen-tpu[eval]'"


def find_tasks(tasks: list[str], include_path: str | None = None) -> TaskManager:
    """lm-eval's index of tasks, with all of these in it.

    Reading the thousands of task files that lm-eval comes with takes it ten seconds: that is left out where every name is a
    task of `include_path` (groups may have members from anywhere).

    Raises:
        ValueError: lm-eval is missing, or knows no such task.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError(MISSING)
    from lm_eval.tasks import TaskManager

    if include_path is not None:
        if not Path(include_path).is_dir():
            raise ValueError(f"there is no folder {include_path}; --include-path names one with task files")
        own = TaskManager(include_path=include_path, include_defaults=False)
        if set(tasks) <= set(own.all_subtasks):
            return own
    manager = TaskManager(include_path=include_path)
    unknown = [task for task in tasks if not manager.match_tasks([task])]
    if unknown:
        raise ValueError(f"lm-eval knows no task {', '.join(unknown)}; --include-path adds a folder of task files")
    return manager


def evaluate(
    model: CausalLM,
    tokenizer: PreTrainedTokenizerBase,
    tasks: list[str],
    *,
    include_path: str | None = None,
    task_manager: TaskManager | None = None,
    num_fewshot: int | None = None,
    batch_size: int | str = "auto",
    limit: int | None = None,
    max_length: int | None = None,
    log_samples: bool = False,
) -> dict:
    """What `lm_eval.simple_evaluate` returns for these tasks.

    Args:
        task_manager: as `find_tasks` returns it for these tasks, where it has been called already.
    """
    task_manager = task_manager or find_tasks(tasks, include_path)
    import lm_eval

    from torchqwen_tpu.evaluation.lm_eval_model import TorchQwenLM

    return lm_eval.simple_evaluate(
        TorchQwenLM(model, tokenizer, batch_size=batch_size, max_length=max_length),
        tasks=tasks,
        task_manager=task_manager,
        num_fewshot=num_fewshot,
        limit=limit,
        log_samples=log_samples,
    )


def format_results(results: dict) -> str:
    """The table that lm-eval prints."""
    from lm_eval.utils import make_table

    return make_table(results)


def write_results(results: dict, file: Path) -> None:
    """Everything as JSON, in the form of lm-eval's own result files."""
    from lm_eval.utils import handle_non_serializable

    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(results, indent=2, default=handle_non_serializable, ensure_ascii=False) + "\n")
