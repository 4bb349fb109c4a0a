"""Choices of the true next line of a file, in lighteval (`pip install lighteval`), on text that the model has not seen.

This file is what lighteval calls a custom task; the model is what it calls a custom model. On the command line:

    lighteval custom examples/tiny-qwen3.5-moe torchqwen_tpu/evaluation/lighteval_model.py next_line \
        --custom-tasks examples/lighteval_next_line.py

Expected output:

TODO
"""

import tempfile
from pathlib import Path

from lighteval.metrics.metrics import Metrics
from lighteval.tasks.lighteval_task import LightevalTaskConfig
from lighteval.tasks.requests import Doc

EXAMPLES = Path(__file__).parent


def next_line(line: dict, task_name: str) -> Doc:
    return Doc(task_name=task_name, query=line["context"], choices=line["choices"], gold_index=line["label"])


TASKS_TABLE = [
    LightevalTaskConfig(
        name="next_line",
        prompt_function=next_line,
        hf_repo=str(EXAMPLES / "held_out"),
        hf_subset="default",
        hf_avail_splits=["train"],
        evaluation_splits=["train"],
        metrics=[Metrics.loglikelihood_acc],
    )
]


def main() -> None:
    from lighteval.logging.evaluation_tracker import EvaluationTracker
    from lighteval.models.custom.custom_model import CustomModelConfig
    from lighteval.pipeline import ParallelismManager, Pipeline, PipelineParameters

    from torchqwen_tpu.evaluation import lighteval_model

    with tempfile.TemporaryDirectory() as folder:
        pipeline = Pipeline(
            tasks="next_line",
            pipeline_parameters=PipelineParameters(
                launcher_type=ParallelismManager.CUSTOM, custom_tasks_directory=__file__, bootstrap_iters=0
            ),
            evaluation_tracker=EvaluationTracker(output_dir=folder),
            model_config=CustomModelConfig(
                model_name=str(EXAMPLES / "tiny-qwen3.5-moe"), model_definition_file_path=lighteval_model.__file__
            ),
        )
        pipeline.evaluate()
    results = pipeline.get_results()["results"]["all"]
    print(f"accuracy {results['acc']:.4f}")


if __name__ == "__main__":
    main()
