"""Who runs next: requests, slots and pages of every data-parallel rank. It touches no device.

A rank takes requests in order of arrival as far as its slots and pages go. A prompt is prefilled in chunks under a token
budget, then its request decodes several tokens a step. A decoding request whose rank has no page left takes those of the
request that came last, which starts over later from the tokens it has (recompute): the oldest request of a rank can always
go on, so that everything ends.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from torchqwen_tpu.runtime.prefix import PagePool
from torchqwen_tpu.runtime.request import Request

FULL = 0.75
"""Share of the running requests from which decoding ones do not wait for the others: a step costs by its rows, used or not.
As few as the narrowest step takes never wait."""
PATIENCE = 4
"""Prefill steps in a row after which decoding requests get their turn, however few they are."""


@dataclass(frozen=True)
class Piece:
    """The next `count` tokens of a request, in one prefill step."""

    request: Request
    count: int

    @property
    def is_last(self) -> bool:
        """Whether the token after them is to be chosen."""
        return self.count == self.request.pending


@dataclass(frozen=True)
class Move:
    """Recurrent states that go from a place to another, within a rank: from slot to checkpoint, back, or to another slot."""

    rank: int
    origin: int
    target: int


class Rank:
    """Slots, pages and running requests of one rank; the requests in order of arrival."""

    def __init__(self, index: int, slots: int, pages: int, page_size: int, checkpoints: int):
        self.index = index
        self.pool = PagePool(pages, page_size, checkpoints)
        self.slots = list(range(slots))  # a heap: the lowest first
        self.running: list[Request] = []

    @property
    def load(self) -> int:
        """Tokens that its requests have yet to take or may yet generate."""
        return sum(request.max_tokens - request.computed for request in self.running)


class Scheduler:
    """Requests over `ranks` ranks.

    Args:
        slots, pages: of each rank.
        widths: how many slots a rank a decode step may take, its first ones; ascending, the last takes all.
        token_budget: the most tokens of a rank's prefill step.
        decode_steps: the most tokens that a decode step generates.
        mixed: decoding requests take part in prefill steps, a token each.
    """

    def __init__(
        self, ranks: int, slots: int, pages: int, page_size: int, checkpoints: int,
        *, widths: Sequence[int], token_budget: int, decode_steps: int, mixed: bool,
    ):  # fmt: skip
        self.ranks = [Rank(index, slots, pages, page_size, checkpoints) for index in range(ranks)]
        self.slots, self.widths = slots, widths
        self.page_size, self.token_budget, self.decode_steps, self.mixed = page_size, token_budget, decode_steps, mixed
        self.waiting = 0  # requests
        self.preemptions = self.reused_tokens = 0
        self._waiting: list[tuple[int, Request]] = []
        self._delayed = 0  # prefill steps since the last decode step

    @property
    def running(self) -> list[Request]:
        return [request for rank in self.ranks for request in rank.running]

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not any(rank.running for rank in self.ranks)

    def add(self, request: Request) -> None:
        heapq.heappush(self._waiting, (request.number, request))
        self.waiting += 1

    def remove(self, request: Request) -> None:
        """A request has ended, wherever it is; its `finish_reason` is set."""
        if request.rank is None:
            self.waiting -= 1  # and it is passed over when its turn comes
        else:
            self.release(request)

    def admit(self) -> list[Move]:
        """Give waiting requests to ranks, the first first; returns the checkpoints that they start from."""
        moves = []
        while self._waiting:
            request = self._waiting[0][1]
            if request.finish_reason is None:
                rank = self._rank_for(request)
                if rank is None:
                    break
                moves += self._start(rank, request)
                self.waiting -= 1
            heapq.heappop(self._waiting)
        return moves

    def prefill(self) -> list[list[Piece]]:
        """Pieces of every rank for one prefill step; empty lists where nothing waits to be prefilled."""
        if all(request.decodes for request in self.running):
            return [[] for _ in self.ranks]
        self._delayed += 1
        return [self._prefill_of(rank) for rank in self.ranks]

    def decode(self) -> list[tuple[Request, int]]:
        """Requests that decode now, and how many tokens each, with the pages for them."""
        ready = sum(request.decodes for request in self.running)
        if not ready or (self.widths[0] < ready < FULL * len(self.running) and self._delayed < PATIENCE):
            return []  # more are about to decode: the step is better taken with them
        self._delayed = 0
        turns = []
        for rank in self.ranks:
            for request in [request for request in rank.running if request.decodes]:
                steps = min(self.decode_steps, request.max_tokens - len(request.tokens))
                if request.slot is not None and self._grow(rank, request, request.computed + steps):
                    turns.append((request, steps))
        return turns

    def gather(self, requests: Sequence[Request]) -> tuple[int, list[Move]]:
        """Bring running requests into the first slots of their ranks, so far that the narrowest step takes them.

        Returns: the width, and where states are to be brought, which is where requests are from now on.
        """
        for width in self.widths:
            outside = [[] for _ in self.ranks]
            for request in requests:
                if request.slot >= width:
                    outside[request.rank].append(request)
            if all(len(own) <= sum(slot < width for slot in rank.slots) for own, rank in zip(outside, self.ranks, strict=True)):
                break
        moves = []
        for request in itertools.chain(*outside):
            move = Move(request.rank, request.slot, heapq.heapreplace(self.ranks[request.rank].slots, request.slot))
            request.slot = move.target
            moves.append(move)
        return width, moves

    def advance(self, request: Request, count: int) -> list[Move]:
        """The model has taken `count` tokens of the request. Pages that are complete are shared from now on; returns where
        states are to be kept."""
        request.computed += count
        pool = self.ranks[request.rank].pool
        full = min(request.computed, request.prompt_tokens) // self.page_size
        for number in range(len(request.nodes), min(full, len(request.keys))):
            parent = request.nodes[-1] if request.nodes else None
            node = pool.share(parent, request.keys[number], request.pages[number])
            request.nodes.append(node)
            request.pages[number] = node.page
        if not request.cuts or request.computed != request.cuts[0]:
            return []
        request.cuts.pop(0)
        place = pool.keep(request.nodes[request.computed // self.page_size - 1])
        return [] if place is None else [Move(request.rank, request.slot, place)]

    def release(self, request: Request) -> None:
        """What a running request holds is free; it has ended, or starts over."""
        rank = self.ranks[request.rank]
        rank.running.remove(request)
        rank.pool.free(request.pages[len(request.nodes) :])
        rank.pool.release(request.nodes)
        heapq.heappush(rank.slots, request.slot)
        request.pages, request.nodes, request.cuts = [], [], []
        request.rank = request.slot = None
        request.computed = 0

    def _rank_for(self, request: Request) -> Rank | None:
        """The rank that would be done with it first, among those that have room."""
        best, least = None, None
        for rank in self.ranks:
            if not rank.slots:
                continue
            reused = rank.pool.match(self._reusable(request)).nodes
            needed = rank.pool.pages_of(len(request.tokens)) - len(reused) + len(rank.running)  # room to decode for each
            if needed > rank.pool.available - rank.pool.idle_in(reused):
                continue
            load = rank.load - len(reused) * self.page_size
            if least is None or load < least:
                best, least = rank, load
        return best

    def _reusable(self, request: Request) -> list[bytes]:
        """Pages of the prompt that may come from another request; a token is left to go on from."""
        return request.keys[: (len(request.tokens) - 1) // self.page_size]

    def _start(self, rank: Rank, request: Request) -> list[Move]:
        pool, reusable = rank.pool, self._reusable(request)
        match = pool.match(reusable)
        pool.acquire(match.nodes)
        request.rank, request.slot = rank.index, heapq.heappop(rank.slots)
        request.nodes = match.nodes
        request.pages = [node.page for node in match.nodes]
        request.pages += pool.allocate(pool.pages_of(len(request.tokens)) - len(request.pages))
        request.computed = len(match.nodes) * self.page_size
        self.reused_tokens += request.computed
        # States are kept where the next request may leave this one's path: at the prompt's end, and where this one
        # left another's.
        ends = {len(reusable), match.known}
        request.cuts = sorted(self.page_size * end for end in ends if end > len(match.nodes))
        position = next((i for i, other in enumerate(rank.running) if other.number > request.number), len(rank.running))
        rank.running.insert(position, request)
        return [Move(rank.index, match.nodes[-1].checkpoint, request.slot)] if match.nodes else []

    def _prefill_of(self, rank: Rank) -> list[Piece]:
        pieces, room = [], self.token_budget
        if self.mixed:
            for request in [request for request in rank.running if request.decodes]:
                if room and request.slot is not None and self._grow(rank, request, request.computed + 1):
                    pieces.append(Piece(request, 1))
                    room -= 1
        for request in rank.running:
            if request.decodes or not room:
                continue
            end = request.cuts[0] if request.cuts else len(request.tokens)
            pieces.append(Piece(request, min(room, end - request.computed)))
            room -= pieces[-1].count
        return pieces

    def _grow(self, rank: Rank, request: Request, tokens: int) -> bool:
        """Pages for so many tokens; False where the request had to make room for older ones itself."""
        needed = rank.pool.pages_of(tokens) - len(request.pages)
        while needed > rank.pool.available:
            latest = rank.running[-1]
            self.preemptions += 1
            self.release(latest)
            self.add(latest)
            if latest is request:
                return False
        request.pages += rank.pool.allocate(max(needed, 0))
        return True
