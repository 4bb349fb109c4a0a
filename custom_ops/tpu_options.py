"""Options of the TPU compiler that graphs of scanned layers need, for libtpu at run time and ahead of time."""

from __future__ import annotations

import os

GRAPH_OPTIONS = {
    # A loop's arrays of 16 bits are laid out in tiles of 16 rows, arguments in tiles of 8: with this on, every call copies
    # the weights of all scanned layers.
    "xla_tpu_control_large_2nd_minor_layout_for_x16": "false",
}


def use_graph_options() -> None:
    """Hand the options to libtpu, which reads them when it is loaded and never again. An option that is set stays as it is."""
    given = os.environ.get("LIBTPU_INIT_ARGS", "")
    added = [f"--{name}={value}" for name, value in GRAPH_OPTIONS.items() if name not in given]
    if added:
        os.environ["LIBTPU_INIT_ARGS"] = " ".join([*given.split(), *added])
