"""Threads that work ahead of the one that places parameters, and no further than agreed."""

from __future__ import annotations

import threading

import pytest
import torch

from torchqwen_tpu.checkpoint import reader


class Jobs:
    """Jobs of given sizes, each done by one task in a thread; notes what is begun and what threads are used."""

    def __init__(self, sizes):
        self.sizes, self.begun, self.threads = sizes, [], set()

    def start(self, job, submit):
        self.begun.append(job)
        return submit(self._work, job).result

    def _work(self, job):
        self.threads.add((threading.current_thread().name, torch.get_num_threads()))
        return -job

    def size(self, job):
        return self.sizes[job]


@pytest.mark.parametrize(
    ("sizes", "begun"),
    [
        ([1, 1, 1, 1, 1], [4, 5, 5, 5, 5]),
        ([9, 9, 9], [2, 3, 3]),
        ([1, 9, 1, 1], [2, 4, 4, 4]),
        ([2, 2, 2, 2], [2, 3, 4, 4]),
    ],
    ids=str,
)
def test_what_is_begun_while_the_caller_has_a_result(monkeypatch, sizes, begun):
    """Always the next job, and further ones of three bytes together."""
    monkeypatch.setattr(reader, "READ_AHEAD", 3)
    jobs = Jobs(sizes)
    seen = []
    for job, result in reader.ahead(range(len(sizes)), jobs.start, jobs.size):
        assert result == -job
        seen.append(len(jobs.begun))
    assert seen == begun and jobs.begun == list(range(len(sizes)))


def test_an_operation_takes_one_thread_inside_and_as_many_as_before_outside():
    before = torch.get_num_threads()
    jobs = Jobs([1])
    list(reader.ahead([0], jobs.start, jobs.size))
    assert {number for _, number in jobs.threads} == {1} and torch.get_num_threads() == before


def test_a_job_that_fails_ends_the_iteration():
    class Failing(Jobs):
        def _work(self, job):
            if job == 1:
                raise OSError("cut short")
            return super()._work(job)

    jobs = Failing([1, 1, 1])
    before, seen = torch.get_num_threads(), []
    with pytest.raises(OSError, match="cut short"):
        for job, _ in reader.ahead(range(3), jobs.start, jobs.size):
            seen.append(job)
    assert seen == [0] and torch.get_num_threads() == before
