"""Traces and compiles graphs, each in a process of its own.

torch_xla fixes its number of (virtual) devices once a process, and libtpu takes the options of its dump only when it is
loaded. The dump holds the final bundle schedule of every program; it goes to a temporary folder that is gone afterwards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Protocol, TypeVar

from custom_ops.cost_model import GIB
from custom_ops.schedule.bundles import Loop, ScheduleError, read_schedule
from custom_ops.tpu_compiler import environment_with
from torchqwen_tpu.planning.arguments import Argument

MEMORY = 4 * GIB
"""That a process may take: a mixed step of 397B takes 2.8."""
_BUNDLES = "-final_bundles.txt"
_HELD = (signal.SIGINT, signal.SIGTERM)
_LOOK = 0.1
"""Seconds between two looks at the processes."""
Key = TypeVar("Key", bound=Hashable)


class Compiled(Protocol):
    """What can be compiled: a dataclass of plain values that the process of its `module` understands, for `devices`."""

    module: str
    devices: int


@dataclass(frozen=True)
class CompiledStep:
    """What the TPU compiler made of a graph.

    Args:
        hlo: text of the scheduled module, of one device.
        schedules: programs by the name of their instruction.
        memory: of one device in bytes: 'argument', 'output', 'alias', 'temp', 'generated_code'.
        seconds: that tracing and compiling took.
        peak: bytes of the process that did it.
        fits: false where the graph needs more memory than a core has; 'temp' then is what it needs beside its arguments as
            the compiler says.
        note: what differs from what runs by default.
    """

    graph: Compiled
    hlo: str
    schedules: dict[str, Loop]
    memory: dict[str, int]
    arguments: tuple[Argument, ...]
    seconds: float
    peak: int
    fits: bool = True
    note: str = ""

    @property
    def slots(self) -> int:
        """Sequences of a core that the states have room for."""
        return next(argument.shape[1] for argument in self.arguments if argument.part == "recurrent states")


def compile_steps(graphs: Mapping[Key, Compiled], report: Callable[[Key, str], None]) -> dict[Key, CompiledStep]:
    """Compile graphs for their topologies, as many at once as there are processors and memory for.

    Args:
        report: told when a graph's compilation begins and ends.

    Raises:
        ValueError: the layout does not suit the model (in the words of the process).
        RuntimeError: what the compiler refuses for another reason than memory.
    """
    waiting, running, done = list(graphs), {}, {}
    with contextlib.ExitStack() as stack:
        while waiting or running:
            while waiting and (not running or len(running) < _at_once()):
                key = waiting.pop(0)
                report(key, "compiling")
                with _held_signals():
                    running[key] = stack.enter_context(_Compilation(graphs[key]))
            for key in [key for key, compilation in running.items() if compilation.ended]:
                done[key] = running.pop(key).result()
                report(key, f"compiled in {done[key].seconds:.0f} s")
            if running:
                time.sleep(_LOOK)
    return {key: done[key] for key in graphs}


@contextlib.contextmanager
def _held_signals() -> Iterator[None]:
    """Ctrl-C and termination wait until the block ends: a process that starts is known to whoever has to end it.

    The handlers are exchanged, not the signals blocked: a mask holds for one thread alone, and the libraries' threads would
    take the signal and have Python run its handler in the midst of the block.
    """
    if threading.current_thread() is not threading.main_thread():  # no handler runs here
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    before = {number: signal.signal(number, lambda *signalled: came.append(signalled)) for number in _HELD}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for number, frame in came[:1]:
        if callable(before[number]):
            before[number](number, frame)
        elif before[number] != signal.SIG_IGN:
            signal.raise_signal(number)


def _at_once() -> int:
    """Processes that may run at once, by processors and by memory beside one that runs."""
    line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable:"))
    return min(len(os.sched_getaffinity(0)), 1 + 1024 * int(line.split()[1]) // MEMORY)


class _Compilation(contextlib.AbstractContextManager):
    """The process of one graph and its folder; both are gone when the context ends, however it ends."""

    def __init__(self, graph: Compiled):
        self.graph, self._started = graph, time.perf_counter()
        self._temporary = tempfile.TemporaryDirectory(prefix="torchqwen-plan-")
        self._folder = Path(self._temporary.name)
        dump = self._folder / "dump"
        options = (f"--xla_jf_dump_to={dump}", "--xla_jf_dump_llo_text=true", "--xla_jf_dump_llo_pass_label_regex=^final")
        environment = environment_with(*options) | {
            "PJRT_DEVICE": "CPU",
            "CPU_NUM_DEVICES": str(graph.devices),
            "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path),
            "TMPDIR": str(self._folder),
        }
        (self._folder / "graph.json").write_text(json.dumps(dataclasses.asdict(graph)))
        command = [sys.executable, "-m", graph.module, str(self._folder)]
        with (self._folder / "log").open("w") as log:
            # In a session of its own it hears nothing of Ctrl-C: this process ends it.
            self._process = subprocess.Popen(
                command, env=environment, stdout=subprocess.DEVNULL, stderr=log, start_new_session=True
            )

    def __exit__(self, *_) -> None:
        with _held_signals():
            self._process.kill()
            self._process.wait()
            self._temporary.cleanup()

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def result(self) -> CompiledStep:
        """What the process left."""
        seconds, file = time.perf_counter() - self._started, self._folder / "result.json"
        if self._process.returncode or not file.exists():
            raise RuntimeError(_last_lines(self._folder / "log"))
        answer = json.loads(file.read_text())
        if "error" in answer:
            raise ValueError(answer["error"])
        step = CompiledStep(
            graph=self.graph,
            hlo=(self._folder / "hlo").read_text() if answer["fits"] else "",
            schedules=_schedules(self._folder / "dump"),
            memory=answer["memory"],
            arguments=tuple(Argument(part, size, tuple(shape)) for part, size, shape in answer["arguments"]),
            seconds=seconds,
            peak=answer["peak"],
            fits=answer["fits"],
            note=answer.get("note", ""),
        )
        self._temporary.cleanup()
        return step


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
