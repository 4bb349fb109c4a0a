"""Will a model fit, and how fast would it be: answered by the TPU compiler, without a TPU.

`trace` traces a step on placeholders, `compile` hands it to the compiler in a process of its own, `hlo` and `traffic` read what
came back, `simulate` plays it in the cost model of `custom_ops.cost_model`, `programs` knows what single instructions take,
`load` and `kernels` supply what depends on data, `planner` puts it together, `report` and `html` show it. All times are
modelled.
"""

from torchqwen_tpu.planning.planner import plan as plan_request
from torchqwen_tpu.planning.request import PlanRequest
from torchqwen_tpu.planning.result import LayoutPlan, Plan, Step


def plan(model: str, **options) -> Plan:
    """What a model would need and how fast it would be on a TPU: see `PlanRequest` for the options and `Plan` for the answer.

    Compiling takes minutes, in processes of its own.

    Raises:
        FileNotFoundError, ValueError: no such model or topology, another family, a layout that does not divide.
        TpuCompilerMissing: libtpu is not installed.
    """
    return plan_request(PlanRequest(model, **options))


__all__ = ["LayoutPlan", "Plan", "PlanRequest", "Step", "plan"]
