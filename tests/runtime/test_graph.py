"""Compiled graphs beside Python: what frees their inputs, and when."""

from __future__ import annotations

import subprocess
import sys

FREED_IN_FLIGHT = """
import torch
from torchqwen_tpu.parallel.mesh import build_mesh
from torchqwen_tpu.runtime.graph import CompiledGraph

mesh = build_mesh()

def weight():
    # In memory that XLA uses where it lies: freeing it takes Python's lock.
    return mesh.give(torch.ones(1024, 1024), (None, None))

graph = CompiledGraph(lambda matrix: [matrix @ matrix], [weight()])
for _ in range(250):
    spent = weight()
    graph([spent])
    del spent  # the thread that runs the graph holds it now
    (product,) = graph([weight()])
print(product.sum().item())
"""
SECONDS = 240
"""Far more than the program takes (about 15)."""


def test_inputs_may_be_freed_while_their_graph_runs():
    """In a process of its own, since what it looks for is that process's standing still."""
    result = subprocess.run(
        [sys.executable, "-c", FREED_IN_FLIGHT], capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert result.returncode == 0, result.stderr
    assert float(result.stdout) == 1024.0**3
