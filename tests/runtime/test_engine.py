"""The engine: every request gets what it would get alone, bad ones an error of their own, and nothing is left behind."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import serving
import torch
from support import random_rows, reference_tokens
from transformers import GenerationConfig

import torchqwen_tpu
from torchqwen_tpu import Engine, EngineConfig
from torchqwen_tpu.runtime.graph import compilations

SIZES = {"max_sequences": 8, "token_budget": 64, "pages": 24}
PROMPTS = random_rows((1, 3, 16, 17, 90), seed=50)
NEW = 12
GREEDY = {"do_sample": False, "max_new_tokens": NEW}
SAMPLED = {"do_sample": True, "max_new_tokens": NEW, "top_k": 0, "temperature": 1.3}


@pytest.fixture(scope="module")
def model(small_folder):
    return torchqwen_tpu.AutoModelForCausalLM.from_pretrained(
        small_folder, dtype="float32", runtime=torchqwen_tpu.RuntimeConfig(page_size=16)
    )


@pytest.fixture(scope="module")
def warm(model):
    return Engine(model, EngineConfig(**SIZES))


@pytest.fixture
def engine(warm):
    """The warm engine; afterwards it is empty, and nothing was compiled."""
    before = compilations()
    warm.reset_statistics()
    yield warm
    assert serving.is_empty(warm)
    assert compilations() == before and warm.statistics.compilations == 0


def tokens(outputs) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def test_greedy_as_transformers(engine, small_reference):
    outputs = engine.generate(PROMPTS, GREEDY)
    assert tokens(outputs) == [reference_tokens(small_reference, prompt, NEW) for prompt in PROMPTS]
    assert [output.prompt_token_ids for output in outputs] == PROMPTS
    assert {output.finish_reason for output in outputs} == {"length"}


@pytest.fixture(scope="module")
def sampled_by_generate(small) -> list[int]:
    return small.generate(torch.tensor(PROMPTS[1:2]), seed=4, **SAMPLED)[0, 3:].tolist()


def test_sampled_as_generate(sampled_by_generate, engine):
    together = engine.generate(PROMPTS, {**SAMPLED, "seed": 4})
    assert together[1].token_ids == sampled_by_generate
    assert tokens(engine.generate(PROMPTS[::-1], {**SAMPLED, "seed": 4})) == tokens(together)[::-1]


PARAMETERS = [{"top_k": 5}, {"top_k": 64}, {"top_k": 65}, {"top_p": 0.5}, {"min_p": 0.2}, {"top_k": 1}, {"do_sample": False}]


def test_every_request_has_its_own_parameters(engine):
    """Beside others that sample otherwise, or not at all, as alone."""
    params = [{**SAMPLED, "seed": number, **own} for number, own in enumerate(PARAMETERS)]
    prompts = [PROMPTS[4]] * len(params)
    together = tokens(engine.generate(prompts, params))
    assert together == serving.alone(engine, prompts, params)
    assert together[-1] == together[-2]


def test_stop_tokens_of_each_request(engine):
    (full,) = tokens(engine.generate(PROMPTS[2:3], GREEDY))
    stops = [full[3], [full[7], 95], None]
    outputs = engine.generate(PROMPTS[2:3] * 3, [{**GREEDY, "eos_token_id": stop} for stop in stops])
    for output, stop in zip(outputs, ([full[3]], [full[7], 95], []), strict=True):
        ends = [place for place, token in enumerate(full) if token in stop]
        assert output.token_ids == (full[: ends[0] + 1] if ends else full)
        assert output.finish_reason == ("stop" if ends else "length")


PENALTIES = [
    {"repetition_penalty": 1.5},
    {"repetition_penalty": 0.6},
    {"min_new_tokens": 8},
    {"min_length": 100},
    {"repetition_penalty": 1.3, "min_new_tokens": 7},
]


@pytest.fixture(scope="module")
def penalized(small, small_reference) -> list[tuple[list[int], dict, list[int]]]:
    """Prompts, parameters with penalties and what generate() gives, which are transformers' tokens where they are greedy.

    The prompts start over in the continuation, and stop tokens come early in it.
    """
    cases = []
    for number, own in enumerate(PENALTIES):
        prompt = PROMPTS[3] if number % 2 else PROMPTS[4]
        (free,) = small.generate(torch.tensor([prompt]), **GREEDY)
        stops = {"eos_token_id": [int(free[len(prompt) + 2]), 95], "pad_token_id": 0}
        for how in (GREEDY, {**SAMPLED, "seed": number, "top_k": 20}):
            (answer,) = small.generate(torch.tensor([prompt]), **how, **stops, **own)
            if how is GREEDY:
                (want,) = small_reference.generate(torch.tensor([prompt]), **how, **stops, **own)
                assert torch.equal(answer, want)
            cases.append((prompt, {**how, **stops, **own}, answer[len(prompt) :].tolist()))
    return cases


def test_penalties_as_generate(engine, penalized):
    """All at once, beside requests without any, each as alone."""
    prompts, params, expected = map(list, zip(*penalized, strict=True))
    (plain,) = tokens(engine.generate(PROMPTS[2:3], GREEDY))
    outputs = tokens(engine.generate([*prompts, PROMPTS[2]], [*params, GREEDY]))
    assert outputs == [*expected, plain]


class Letters:
    """A tokenizer whose token n is a letter."""

    def __call__(self, text):
        return type("Encoding", (), {"input_ids": [ord(letter) - 33 for letter in text]})

    def decode(self, ids, skip_special_tokens=False):
        return "".join(chr(33 + token) for token in ids)


def test_texts_and_stop_strings(engine, model, monkeypatch):
    (plain,) = engine.generate(PROMPTS[3:4], GREEDY)
    with pytest.raises(ValueError, match="tokenizer"):
        engine.add(PROMPTS[3], {**GREEDY, "stop_strings": "x"})
    with pytest.raises(ValueError, match="tokenizer"):
        engine.add("a text", GREEDY)
    monkeypatch.setattr(engine, "tokenizer", Letters())
    text = Letters().decode(PROMPTS[3])
    answer = Letters().decode(plain.token_ids)
    (output,) = engine.generate([text], {**GREEDY, "stop_strings": ["no such text", answer[4:6]]})
    end = answer.index(answer[4:6]) + 2
    assert output.text == answer[:end] and output.token_ids == plain.token_ids[:end] and output.finish_reason == "stop"


@pytest.fixture(scope="module")
def random_load(warm) -> tuple[list[list[int]], list[dict], list[list[int]]]:
    """Prompts and parameters of 40 requests, and what each gets alone."""
    prompts, params = serving.load(40, longest=150, most_new=100)
    return prompts, params, serving.alone(warm, prompts, params)


@pytest.mark.parametrize("mixed", [False, True], ids=["apart", "mixed"])
def test_random_load_as_alone(random_load, engine, model, mixed):
    """Fewer pages than they would take, and some aborted on their way."""
    prompts, params, expected = random_load
    own = Engine(model, EngineConfig(**SIZES, mixed=True), warm_up=False) if mixed else engine
    aborted = frozenset(range(0, 40, 8))
    outputs = serving.serve(own, prompts, params, aborted=aborted)
    assert own.scheduler.preemptions > 0
    assert not [number for number in outputs if serving.differs(outputs[number], expected[number])]
    assert {number for number in outputs if outputs[number].finish_reason == "abort"} <= aborted
    assert serving.is_empty(own)


def test_prefixes_are_reused(engine):
    """The second request shows where they part, from the third on they start there; the answers stay."""
    system = random_rows((70,), seed=51)[0]
    prompts = [system + tail for tail in random_rows((20, 9, 30, 1), seed=52)]
    expected = serving.alone(engine, prompts, [GREEDY] * 4)
    engine.forget_prefixes()
    reused = []
    for prompt, want in zip(prompts, expected, strict=True):
        engine.reset_statistics()
        assert tokens(engine.generate([prompt], GREEDY)) == [want]
        reused.append(engine.statistics.reused_tokens)
    assert reused == [0, 0, 64, 64]


def test_a_conversation_goes_on_from_its_last_prompt(engine):
    prompt, reusable = PROMPTS[4], 0
    for _ in range(3):
        engine.reset_statistics()
        (output,) = engine.generate([prompt], GREEDY)
        assert engine.statistics.reused_tokens == reusable
        reusable = (len(prompt) - 1) // 16 * 16
        prompt = prompt + output.token_ids + [5]
    engine.forget_prefixes()
    assert tokens(engine.generate([output.prompt_token_ids], GREEDY)) == [output.token_ids]


def test_the_same_prompt_at_once_and_again(engine):
    (first, *others) = tokens(engine.generate([PROMPTS[4]] * 6, GREEDY))
    assert others == [first] * 5
    assert tokens(engine.generate([PROMPTS[4]] * 3, GREEDY)) == [first] * 3
    assert engine.statistics.reused_tokens >= 3 * 80


BAD = {
    "an id beyond the vocabulary": ([3, 96], {}, "96"),
    "a text": ("hello", {}, "tokenizer"),
    "nested": ([[3, 4]], {}, "list of token ids"),
    "ragged": ([[3], [4, 5]], {}, "list of token ids"),
    "floats": ([1.5, 2.0], {}, "list of token ids"),
    "nothing": (None, {}, "list of token ids"),
    "empty": ([], {}, "empty"),
    "an unknown parameter": ([3], {"temprature": 1}, "temperature"),
    "never fits": ([3] * 10, {"max_new_tokens": 250}, "never fit"),
    "a prompt that never fits": ([3] * 257, {}, "never fit"),
}


def test_bad_requests_fail_alone(engine):
    prompts, params, good = [], [], []
    for prompt, own, _ in BAD.values():
        good.append(len(prompts))
        prompts += [PROMPTS[1], prompt]
        params += [GREEDY, {**GREEDY, **own}]
    outputs = engine.generate(prompts, params)
    assert len({tuple(outputs[place].token_ids) for place in good}) == 1
    assert all(outputs[place].finish_reason == "length" for place in good)
    for place, (_, _, named) in zip(good, BAD.values(), strict=True):
        refused = outputs[place + 1]
        assert refused.finish_reason == "error" and named in refused.error and refused.token_ids == []


@pytest.mark.parametrize("case", BAD.values(), ids=BAD)
def test_add_refuses_before_anything_runs(engine, case):
    prompt, own, named = case
    with pytest.raises(ValueError, match=named):
        engine.add(prompt, {**GREEDY, **own})
    assert not engine.has_work


def test_prompts_may_be_arrays(engine):
    plain = tokens(engine.generate(PROMPTS[1:2], GREEDY))
    for kind in (torch.tensor, np.array, tuple):
        assert tokens(engine.generate([kind(PROMPTS[1])], GREEDY)) == plain


def test_too_few_params(engine):
    with pytest.raises(ValueError, match="params"):
        engine.generate(PROMPTS, [GREEDY])


def test_without_a_limit_a_request_goes_on_to_the_engines(engine):
    (output,) = engine.generate([PROMPTS[4]], {"do_sample": False})
    assert len(output.token_ids) == engine.max_length - 90 == 256 - 90


def test_stream(engine):
    expected = tokens(engine.generate(PROMPTS, GREEDY))
    parts, seen = {}, []
    for output in engine.stream(PROMPTS, GREEDY):
        parts.setdefault(output.request_id, []).extend(output.new_token_ids)
        seen.append(output.finished)
    assert list(map(parts.get, sorted(parts, key=int))) == expected
    assert len(seen) > len(PROMPTS) and sum(seen) == len(PROMPTS)


def test_a_closed_stream_aborts(engine):
    stream = engine.stream(PROMPTS, {**GREEDY, "max_new_tokens": 100})
    next(stream)
    stream.close()
    ended = [output for output in engine.step() if output.finished]
    assert {output.finish_reason for output in ended} == {"abort"} and not engine.has_work


def test_outputs_of_other_requests_wait_for_step(engine):
    own = engine.add(PROMPTS[0], GREEDY, request_id="mine")
    engine.generate(PROMPTS[1:], GREEDY)
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert {output.request_id for output in outputs} == {own}
    assert sum((output.new_token_ids for output in outputs), []) == outputs[-1].token_ids and outputs[-1].finished


def test_ids(engine):
    engine.add(PROMPTS[0], GREEDY, request_id="a")
    with pytest.raises(ValueError, match="in use"):
        engine.add(PROMPTS[0], GREEDY, request_id="a")
    engine.abort("a")
    engine.abort("a")
    engine.abort("unknown")
    (output,) = engine.step()
    assert output.finish_reason == "abort" and output.token_ids == []
    engine.add(PROMPTS[0], GREEDY, request_id="a")
    while engine.has_work:
        engine.step()


def test_ten_thousand_requests_at_once(engine):
    """They queue; all but a few are then aborted."""
    ids = [engine.add([1 + number % 90], {**GREEDY, "max_new_tokens": 2}) for number in range(10_000)]
    ended = engine.step()
    for request_id in ids[100:]:
        engine.abort(request_id)
    while engine.has_work:
        ended += engine.step()
    reasons = {output.request_id: output.finish_reason for output in ended if output.finished}
    assert len(reasons) == 10_000
    assert [reasons[request_id] for request_id in ids[:100]] == ["length"] * 100


def test_requests_from_other_threads(engine):
    (expected,) = tokens(engine.generate(PROMPTS[2:3], GREEDY))

    def add():
        for _ in range(20):
            engine.add(PROMPTS[2], GREEDY)

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    outputs = []
    while any(thread.is_alive() for thread in threads) or engine.has_work:
        outputs += [output for output in engine.step() if output.finished]
    assert tokens(outputs) == [expected] * 80


def test_statistics(engine):
    engine.generate(PROMPTS[3:], GREEDY)
    statistics = engine.statistics
    assert statistics.generated_tokens == 2 * NEW and statistics.prefill_tokens == 17 + 90 - 1  # a last one may be decoded
    assert 0 < statistics.device_seconds <= statistics.step_seconds
    assert 0 < statistics.pages / statistics.steps <= 1 and 0 < statistics.slots / statistics.steps <= 1


def test_a_compilation_in_service_is_a_fault(engine, monkeypatch, caplog):
    counts = iter(range(100))
    monkeypatch.setattr("torchqwen_tpu.runtime.engine.compilations", lambda: next(counts))
    logger = __import__("logging").getLogger("torchqwen_tpu")
    logger.propagate, before = True, logger.propagate
    engine.generate(PROMPTS[:1], {**GREEDY, "max_new_tokens": 1})
    logger.propagate = before
    assert engine.statistics.compilations == 1 and "fault" in caplog.text
    engine.reset_statistics()


@pytest.mark.parametrize(("config", "named"), [
    ({"cache_memory": 1000}, "cache_memory"),
    ({"cache_memory": 0}, "cache_memory"),
    ({"max_sequences": 0}, "max_sequences"),
    ({"token_budget": 2.5}, "token_budget"),
    ({"pages": 0}, "pages"),
    ({"checkpoints": -1}, "checkpoints"),
])  # fmt: skip
def test_sizes_that_cannot_be(model, config, named):
    with pytest.raises(ValueError, match=named):
        Engine(model, EngineConfig(**config), warm_up=False)


def test_memory_bounds_pages_and_lengths(model):
    """A page is 16 tokens of 4 heads of 32 in float32: 8 KiB; states beside it are small."""
    few = Engine(model, EngineConfig(max_sequences=2, checkpoints=0, cache_memory=2**17), warm_up=False)
    many = Engine(model, EngineConfig(max_sequences=2, checkpoints=0, cache_memory=2**30), warm_up=False)
    pages = [engine.scheduler.ranks[0].pool.total for engine in (few, many)]
    assert 0 < pages[0] < 16 and few.max_length == 16 * pages[0]
    assert pages[1] == 2 * 256 // 16 and many.max_length == 256  # more would never be used


def test_generation_config_and_defaults(engine, model, monkeypatch):
    (plain,) = tokens(engine.generate(PROMPTS[2:3], GREEDY))
    config = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=plain[5])
    (output,) = engine.generate(PROMPTS[2:3], config)
    assert output.token_ids == plain[: plain.index(plain[5]) + 1]
