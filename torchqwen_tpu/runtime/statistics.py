"""What an engine has done."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Statistics:
    """Counts since `Engine.reset_statistics`, times in seconds.

    Attributes:
        step_seconds, device_seconds: time in steps; the part of it in which the device was given work or waited for. The
            rest is the host's.
        prefill_tokens: tokens that prefill steps took, those computed again after a preemption included.
        reused_tokens: tokens that were not computed because an earlier request had computed them.
        compilations: graphs compiled in steps: a fault after warm-up.
        pages, slots: shares of the pools in use, summed over steps.
    """

    steps: int = 0
    step_seconds: float = 0.0
    device_seconds: float = 0.0
    prefill_tokens: int = 0
    generated_tokens: int = 0
    reused_tokens: int = 0
    preemptions: int = 0
    compilations: int = 0
    pages: float = 0.0
    slots: float = 0.0
