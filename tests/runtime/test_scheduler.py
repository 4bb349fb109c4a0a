"""The scheduler without a model: every request gets through, in turn, within slots, pages and budget, whatever comes."""

from __future__ import annotations

import numpy as np
import pytest

from torchqwen_tpu.runtime.parameters import Parameters
from torchqwen_tpu.runtime.prefix import PagePool, page_keys
from torchqwen_tpu.runtime.request import Request
from torchqwen_tpu.runtime.scheduler import Scheduler

PAGE = 16
WIDTHS = (1, 2, 4, 8)


def request(number: int, prompt, new: int) -> Request:
    tokens = prompt if isinstance(prompt, list) else np.random.default_rng(number).integers(0, 9, prompt).tolist()
    own = Request(str(number), number, tokens, len(tokens), len(tokens) + new, Parameters(new), 0.0)
    own.keys = page_keys(tokens, PAGE)
    return own


def scheduler(ranks=1, slots=4, pages=32, checkpoints=4, token_budget=64, decode_steps=8, mixed=False) -> Scheduler:
    return Scheduler(
        ranks, slots, pages, PAGE, checkpoints, widths=[width for width in WIDTHS if width <= slots],
        token_budget=token_budget, decode_steps=decode_steps, mixed=mixed,
    )  # fmt: skip


def check(own: Scheduler) -> None:
    """No slot and no page has two owners but the pages of a shared prefix, and none is lost."""
    for rank in own.ranks:
        slots = [running.slot for running in rank.running]
        assert sorted([*slots, *rank.slots]) == list(range(own.slots))
        private = [page for running in rank.running for page in running.pages[len(running.nodes) :]]
        shared = {node.page for running in rank.running for node in running.nodes}
        assert len(set(private)) == len(private) and not shared & set(private)
        assert rank.pool.used == len(private) + len(shared) <= rank.pool.total
        for running in rank.running:
            assert [node.page for node in running.nodes] == running.pages[: len(running.nodes)]
            assert len(running.pages) * PAGE >= running.computed


def step(own: Scheduler) -> list[Request]:
    """One step of an engine whose model says 1 to everything; returns the requests that ended."""
    own.admit()
    check(own)
    ended = []

    def append(running: Request, count: int) -> None:
        running.tokens += [1] * count
        assert len(running.tokens) <= running.max_tokens
        if len(running.tokens) == running.max_tokens:
            running.finish_reason = "length"
            own.remove(running)
            ended.append(running)

    pieces = own.prefill()
    for rank, pieces_of_rank in zip(own.ranks, pieces, strict=True):
        assert sum(piece.count for piece in pieces_of_rank) <= own.token_budget
        assert len({piece.request for piece in pieces_of_rank}) == len(pieces_of_rank)
        for piece in pieces_of_rank:
            assert piece.request.rank == rank.index and piece.count > 0
            last = piece.is_last
            own.advance(piece.request, piece.count)
            if last:
                append(piece.request, 1)
    turns = own.decode()
    width, moves = own.gather([running for running, _ in turns])
    assert all(running.slot < width for running, _ in turns)
    assert all(move.target < width <= move.origin for move in moves)
    check(own)
    for running, steps in turns:
        assert 0 < steps <= own.decode_steps and running.pending == 1
        assert len(running.pages) * PAGE >= running.computed + steps
        own.advance(running, steps)
        append(running, steps)
    assert any(pieces) or turns, "a step that does nothing never ends"
    check(own)
    return ended


def run(own: Scheduler, requests: list[Request], arrivals: float = 1000) -> list[Request]:
    generator, waiting, ended = np.random.default_rng(0), list(requests), []
    while waiting or not own.is_idle:
        for _ in range(min(generator.poisson(arrivals), len(waiting))):
            own.add(waiting.pop(0))
        if not own.is_idle:
            ended += step(own)
    assert sorted(done.number for done in ended) == list(range(len(requests)))
    for rank in own.ranks:
        assert rank.pool.used == 0
        rank.pool.forget()
        assert rank.pool.is_clean
    return ended


@pytest.mark.parametrize("mixed", [False, True], ids=["apart", "mixed"])
@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("pages", [20, 64])
def test_random_load(ranks, pages, mixed):
    """With few pages many start over; some prompts share a prefix."""
    generator = np.random.default_rng(1)
    prefix = generator.integers(0, 9, 70).tolist()
    requests = []
    for number in range(300):
        prompt = generator.integers(0, 9, generator.integers(1, 150)).tolist()
        requests.append(request(number, prefix + prompt if number % 3 == 0 else prompt, int(generator.integers(1, 100))))
    own = scheduler(ranks, pages=pages, mixed=mixed)
    run(own, requests, arrivals=1.5 * ranks)
    assert own.reused_tokens > 0
    assert (own.preemptions > 0) == (pages == 20)


def test_requests_that_fill_the_pool_alone():
    """Each needs every page; one after another gets them."""
    own = scheduler(pages=8, checkpoints=0)
    ended = run(own, [request(number, 8 * PAGE - 60, 60) for number in range(5)])
    assert [done.number for done in ended] == list(range(5))


def test_the_oldest_is_never_preempted():
    own = scheduler(slots=4, pages=10, checkpoints=0)
    requests = [request(number, 20, 100) for number in range(4)]
    for each in requests:
        own.add(each)
    first_done = next(done for _ in iter(int, 1) for done in step(own))
    assert first_done is requests[0] and own.preemptions > 0


def test_arrival_decides_who_starts():
    own = scheduler(slots=2, checkpoints=0)
    ended = run(own, [request(number, 30, 9) for number in range(12)])
    assert [done.number for done in ended] == list(range(12))


def test_a_request_that_does_not_fit_yet_is_not_overtaken():
    own = scheduler(slots=4, pages=16, checkpoints=0)
    requests = [request(0, 10 * PAGE, 3 * PAGE), request(1, 8 * PAGE, 10), request(2, 5, 10)]
    assert run(own, requests)[0] is requests[0]


def test_least_loaded_rank():
    own = scheduler(ranks=4, slots=4)
    for number, prompt in enumerate((200, 10, 10, 10, 50, 5)):
        own.add(request(number, prompt, 5))
    own.admit()
    assert sorted(len(rank.running) for rank in own.ranks) == [1, 1, 2, 2]
    assert [len(rank.running) for rank in own.ranks if rank.running[0].number == 0] == [1]


def test_a_request_goes_where_its_prefix_is():
    own = scheduler(ranks=4)
    run_one = request(0, 100, 2)
    own.add(run_one)
    own.admit()
    home = run_one.rank
    while not own.is_idle:
        step(own)
    again = request(0, 100, 2)
    again.number = 1
    own.add(again)
    own.admit()
    assert again.rank == home and again.computed == 96


def test_decoding_gets_its_turn_while_prompts_keep_coming():
    own = scheduler(slots=4, pages=400, checkpoints=0)
    talker = request(0, 5, 400)
    own.add(talker)
    step(own)
    for number in range(1, 4):
        own.add(request(number, 1000, 1))
    before, steps = talker.generated, 0
    while own.waiting or any(not running.decodes for running in own.running):
        step(own)
        steps += 1
    assert talker.generated - before >= 8 * (steps // 4)


def test_those_that_go_on_move_together():
    """Slots 0 to 7; the requests in 1, 5 and 6 of rank 0 and the one in 7 of rank 1 are left."""
    own = scheduler(ranks=2, slots=8, pages=400, checkpoints=0)
    for number in range(16):
        own.add(request(number, 5, 50))
    own.admit()
    left = [own.ranks[index].running[place] for index, place in ((0, 1), (0, 5), (0, 6), (1, 7))]
    homes = {running.number: (running.rank, running.slot) for running in left}
    for running in own.running:
        if running not in left:
            running.finish_reason = "length"
            own.remove(running)
    width, moves = own.gather(left)
    assert width == 4 and {running.slot for running in left if running.rank == 0} == {0, 1, 2}
    places = {(move.rank, move.origin): (move.rank, move.target) for move in moves}
    assert len(places) == 3
    assert all(places.get(homes[running.number], homes[running.number]) == (running.rank, running.slot) for running in left)
    check(own)
    assert own.gather(left) == (4, [])
    assert own.gather(left[:1]) == (2, [])


def test_slots_that_others_hold_are_not_taken():
    own = scheduler(slots=4, pages=400, checkpoints=0)
    for number in range(4):
        own.add(request(number, 5, 50))
    own.admit()
    assert own.gather(own.ranks[0].running[3:]) == (4, [])


@pytest.mark.parametrize("place", ["waiting", "prefill", "decode"])
def test_remove(place):
    own = scheduler(slots=1, checkpoints=0)
    first, second = request(0, 100 if place == "prefill" else 10, 50), request(1, 5, 3)
    own.add(first)
    own.add(second)
    step(own)
    gone = second if place == "waiting" else first
    assert first.decodes == (place != "prefill")
    gone.finish_reason = "abort"
    own.remove(gone)
    ended = []
    while not own.is_idle:
        ended += step(own)
    assert ended == [first if gone is second else second]
    own.ranks[0].pool.forget()
    assert own.ranks[0].pool.is_clean


def test_ten_thousand_at_once():
    own = scheduler(ranks=8, slots=8)
    run(own, [request(number, 1 + number % 20, 1 + number % 9) for number in range(10_000)], arrivals=20_000)


# Pages


def put(pool: PagePool, keys: list[bytes], kept: bool = True):
    """The nodes of a request that computes these pages and ends."""
    nodes, pages = [], pool.allocate(len(keys))
    for key, page in zip(keys, pages, strict=True):
        nodes.append(pool.share(nodes[-1] if nodes else None, key, page))
    place = pool.keep(nodes[-1]) if kept else None
    pool.release(nodes)
    return nodes, place


def test_a_prefix_ends_where_states_were_kept():
    pool = PagePool(16, PAGE, 4)
    put(pool, [b"a", b"b"])
    put(pool, [b"a", b"b", b"c", b"d"], kept=False)
    match = pool.match([b"a", b"b", b"c", b"x"])
    assert [node.key for node in match.nodes] == [b"a", b"b"] and match.known == 3
    assert pool.match([b"b"]).known == 0


def test_pages_of_equal_tokens_are_one():
    pool = PagePool(16, PAGE, 4)
    put(pool, [b"a", b"b"])
    put(pool, [b"a", b"b"])
    assert pool.used == 0 and len(pool.match([b"a", b"b"]).nodes) == 2
    pool.forget()
    assert pool.is_clean


def test_the_least_recently_used_go_first():
    pool = PagePool(6, PAGE, 4)
    put(pool, [b"a", b"b"])
    put(pool, [b"c", b"d"])
    nodes = pool.match([b"a", b"b"]).nodes
    pool.acquire(nodes)
    pool.release(nodes)
    pool.free(pool.allocate(4))
    assert pool.match([b"c", b"d"]).known == 0 and pool.match([b"a", b"b"]).known == 2
    pool.free(pool.allocate(5))
    assert pool.match([b"a", b"b"]).known == 1


def test_pages_in_use_stay():
    pool = PagePool(4, PAGE, 4)
    nodes, _ = put(pool, [b"a", b"b"])
    pool.acquire(nodes)
    assert pool.available == 2
    pool.free(pool.allocate(2))
    assert len(pool.match([b"a", b"b"]).nodes) == 2


def test_checkpoints_are_reused():
    pool = PagePool(16, PAGE, 2)
    places = [put(pool, [key])[1] for key in (b"a", b"b", b"c")]
    assert places[0] != places[1] and places[2] == places[0]
    assert [len(pool.match([key]).nodes) for key in (b"a", b"b", b"c")] == [0, 1, 1]
    assert put(pool, [b"c"])[1] is None  # kept already


def test_without_checkpoints_nothing_is_shared():
    own = scheduler(checkpoints=0)
    for _ in range(2):
        run(own, [request(0, 100, 2)])
    assert own.reused_tokens == 0
