"""Traces and compiles one graph in a process of its own.

torch_xla fixes its number of (virtual) devices once a process, and libtpu takes the options of its dump only when it is
loaded. The dump holds the final bundle schedule of every program; it goes to a temporary folder that is gone afterwards.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from custom_ops.schedule.bundles import Loop, ScheduleError, read_schedule
from custom_ops.tpu_compiler import environment_with
from torchqwen_tpu.planning.request import Graph

_BUNDLES = "-final_bundles.txt"


@dataclass(frozen=True)
class Argument:
    """Arguments of one name: `bytes` of a device, without the padding of tiles, in `shape` of one device."""

    part: str
    bytes: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class CompiledStep:
    """What the TPU compiler made of a graph.

    Args:
        hlo: text of the scheduled module, of one device.
        schedules: programs by the name of their instruction.
        memory: of one device in bytes: 'argument', 'output', 'alias', 'temp', 'generated_code', 'peak'.
        seconds: that tracing and compiling took.
        fits: false where the graph needs more memory than a core has; 'temp' then is what it needs beside its arguments as
            the compiler says, or 0 where the arguments alone are too large and nothing was compiled.
    """

    graph: Graph
    hlo: str
    schedules: dict[str, Loop]
    memory: dict[str, int]
    arguments: tuple[Argument, ...]
    seconds: float
    fits: bool = True

    @property
    def slots(self) -> int:
        """Sequences of a core that the states have room for."""
        return next(argument.shape[1] for argument in self.arguments if argument.part == "recurrent states")


def compile_step(config_file: Path, graph: Graph) -> CompiledStep:
    """Compile `graph` for its topology.

    Raises:
        ValueError: the layout does not suit the model (in the words of the child).
        RuntimeError: what the compiler refuses for another reason than memory.
    """
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="torchqwen-plan-") as folder:
        dump = Path(folder) / "dump"
        options = (f"--xla_jf_dump_to={dump}", "--xla_jf_dump_llo_text=true", "--xla_jf_dump_llo_pass_label_regex=^final")
        environment = environment_with(*options) | {
            "PJRT_DEVICE": "CPU",
            "CPU_NUM_DEVICES": str(graph.chips * graph.cores),
            "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path),
            "TMPDIR": folder,
        }
        command = [sys.executable, "-m", "torchqwen_tpu.planning.child", str(config_file), folder]
        (Path(folder) / "graph.json").write_text(json.dumps(dataclasses.asdict(graph)))
        with (Path(folder) / "log").open("w") as log:
            child = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=log)
            try:
                status = child.wait()
            finally:
                child.kill()  # where waiting was interrupted
                child.wait()
        result = Path(folder) / "result.json"
        if status or not result.exists():
            raise RuntimeError(_last_lines(Path(folder) / "log"))
        answer = json.loads(result.read_text())
        if "error" in answer:
            raise ValueError(answer["error"])
        return CompiledStep(
            graph=graph,
            hlo=(Path(folder) / "hlo").read_text() if answer["fits"] else "",
            schedules=_schedules(dump),
            memory=answer["memory"],
            arguments=tuple(Argument(part, size, tuple(shape)) for part, size, shape in answer["arguments"]),
            seconds=time.perf_counter() - started,
            fits=answer["fits"],
        )


def _last_lines(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if "stack_frame" not in line]
    return "the compilation failed:\n" + "\n".join(lines[-12:])


def _schedules(dump: Path) -> dict[str, Loop]:
    """Programs by the name of their instruction. What `read_schedule` does not understand is left out; loops whose bound is
    data have `steps` None."""
    found = {}
    for file in dump.glob(f"*{_BUNDLES}"):
        name = file.name.removesuffix(_BUNDLES).split("-", 1)[1].rpartition("-")[0]
        try:
            found[name] = read_schedule(file.read_text(), counted=False)
        except ScheduleError:
            continue
    return found
