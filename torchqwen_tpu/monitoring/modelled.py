"""What a numerical watch that looks at every step costs on a TPU: steps with and without it through the TPU compiler, modelled.

    python -m torchqwen_tpu.monitoring.modelled --model CONFIG [--topology tpu7x:2x2x1] [--dtype fp8] ...

It takes the arguments of `torchqwen-tpu plan` that describe the load and plans the steps twice. It needs no weights and no TPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections import Counter
from dataclasses import dataclass

from custom_ops.tpu_compiler import TpuCompilerMissing
from torchqwen_tpu.commands.plan import add_request, request_of
from torchqwen_tpu.planning.planner import Progress, plan
from torchqwen_tpu.planning.request import PlanRequest
from torchqwen_tpu.planning.result import Step
from torchqwen_tpu.planning.table import aligned


@dataclass(frozen=True)
class ModelledCost:
    """One kind of step without and with the watch."""

    plain: Step
    watched: Step

    @property
    def added(self) -> float:
        """Part of the step's time."""
        return self.watched.seconds / self.plain.seconds - 1

    @property
    def collectives(self) -> dict[str, float]:
        """How many more of each kind of collective there are in a step; none that are as many as without the watch."""
        runs: Counter[str] = Counter()
        for step, sign in ((self.watched, 1), (self.plain, -1)):
            for entry in step.collectives:
                runs[f"{entry.kind}, {entry.operation}"] += sign * entry.runs
        return {kind: count for kind, count in runs.items() if abs(count) > 1e-6}


def modelled_costs(request: PlanRequest, progress: Progress = lambda what: None) -> dict[str, ModelledCost]:
    """The cost for every kind of step of a plan, in the layout that is best without a watch.

    Raises:
        FileNotFoundError, TpuCompilerMissing: as `plan` does.
        ValueError: also where the model does not fit.
    """
    plain = plan(dataclasses.replace(request, watched=False), progress).best
    if not plain.fits:
        raise ValueError("the model does not fit this topology: torchqwen-tpu plan tells what would help")
    watched = plan(dataclasses.replace(request, layout=plain.layout, watched=True), progress).best
    if not watched.fits:
        raise ValueError("with the watch the model does not fit this topology")
    return {kind: ModelledCost(step, watched.steps[kind]) for kind, step in plain.steps.items()}


def table(costs: dict[str, ModelledCost]) -> str:
    rows = [("modelled step", "ms", "watched, ms", "added", "collectives added")]
    for kind, cost in costs.items():
        named = ", ".join(f"{count:+g} {name}" for name, count in cost.collectives.items())
        seconds = (f"{1e3 * step.seconds:.3f}" for step in (cost.plain, cost.watched))
        rows.append((kind, *seconds, f"{cost.added:+.2%}", named or "none"))
    return "\n".join(aligned(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_request(parser)
    try:
        costs = modelled_costs(request_of(parser.parse_args()), lambda what: print(what, file=sys.stderr, flush=True))
    except (FileNotFoundError, ValueError, TpuCompilerMissing) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    print(table(costs))


if __name__ == "__main__":
    main()
