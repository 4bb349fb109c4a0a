"""The command line: what it prints where, and how it refuses bad input."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys

import pytest
import torch

from torchqwen_tpu.benchmark import format_table
from torchqwen_tpu.chat import ROOM, Conversation
from torchqwen_tpu.cli import main
from torchqwen_tpu.serving_benchmark import format_serving

PROMPT = "The :mod:`json` module"


def run(*arguments) -> int:
    try:
        return main([str(argument) for argument in arguments])
    except SystemExit as stop:  # argparse
        return stop.code


def test_help_names_the_commands(capsys):
    assert run("--help") == 0
    printed = capsys.readouterr().out
    assert all(command in printed for command in ("generate", "chat", "bench"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "--model", "no/such/folder", "--prompt", "x"], "there is no folder no/such/folder"),
        (["chat", "--model", "no/such/folder"], "there is no folder no/such/folder"),
        (["bench", "--model", "no/such/folder"], "there is no folder no/such/folder"),
        (["generate", "--model", "MISTRAL", "--prompt", "x"], "model_type 'mistral'"),
        (["bench", "--model", "MISTRAL"], "model_type 'mistral'"),
        (["generate", "--model", "TINY", "--prompt", ""], "the prompt is empty"),
        (["generate", "--model", "TINY", "--prompt", "x", "--max-new-tokens", "0"], "--max-new-tokens: must be"),
        (["generate", "--model", "TINY", "--prompt", "x", "--dtype", "int4"], "--dtype: invalid choice: 'int4'"),
        (["generate", "--model", "TINY", "--prompt", "x", "--parallel", "pp"], "--parallel: invalid choice: 'pp'"),
        (["generate", "--prompt", "x"], "required: --model"),
        (["bench"], "required: --model"),
        (["bench", "serve"], "required: --model"),
        (["bench", "serve", "--model", "no/such/folder"], "there is no folder no/such/folder"),
        (["bench", "serve", "--model", "TINY", "--input-len", "0"], "--input-len: must be an integer of at least 1"),
        (["bench", "--model", "TINY", "--batch", "1,0"], "--batch: must be an integer of at least 1"),
        (["bench", "--model", "TINY", "--against", "nothing"], "--against: invalid choice"),
        (["evaluate", "--model", "no/such/folder", "--tasks", "x"], "there is no folder no/such/folder"),
        (["evaluate", "--model", "TINY", "--tasks", "no_such_task"], "no task no_such_task"),
        (["evaluate", "--model", "TINY", "--tasks", "x", "--include-path", "no/such/folder"], "no folder no/such/folder"),
        (["evaluate", "--model", "TINY", "--tasks", "x", "--batch-size", "many"], "--batch-size: must be an integer"),
        (["serve"], "invalid choice: 'serve'"),
        ([], "required: COMMAND"),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments, message, tiny_folder, tmp_path, capfd):
    (tmp_path / "config.json").write_text('{"model_type": "mistral"}')
    folders = {"TINY": tiny_folder, "MISTRAL": tmp_path}
    assert run(*(folders.get(argument, argument) for argument in arguments)) == 2
    printed = capfd.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1 and message in printed.err


@pytest.mark.spmd
def test_mesh_that_the_devices_do_not_make_up(tiny_folder):
    command = ["generate", "--model", str(tiny_folder), "--prompt", "x", "--chips", "4", "--cores", "2"]
    result = subprocess.run(
        [sys.executable, "-m", "torchqwen_tpu.cli", *command],
        env={**os.environ, "CPU_NUM_DEVICES": "2"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert result.returncode == 2 and result.stdout == ""
    assert "a mesh of 4 chips × 2 cores needs 8 devices and torch_xla runs 2" in result.stderr
    assert "Traceback" not in result.stderr


def test_generate_prints_one_json_object(tiny_folder, tokenizer, tiny_reference, capsys):
    arguments = ["--model", tiny_folder, "--prompt", PROMPT, "--dtype", "float32", "--greedy", "--max-new-tokens", 12]
    assert run("generate", *arguments, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    prompt = tokenizer(PROMPT, return_tensors="pt")
    expected = tiny_reference.generate(**prompt, do_sample=False, max_new_tokens=12)[0, prompt.input_ids.shape[1] :]
    assert list(result) == ["prompt_token_ids", "token_ids", "text", "seconds"]
    assert result["prompt_token_ids"] == prompt.input_ids[0].tolist()
    assert result["token_ids"] == expected.tolist()
    assert result["text"] == tokenizer.decode(expected, skip_special_tokens=True)
    assert result["seconds"] > 0

    assert run("generate", *arguments) == 0
    assert capsys.readouterr().out == PROMPT + result["text"] + "\n"


def test_generate_samples_by_seed(tiny_folder, capsys):
    def tokens(seed: int) -> list[int]:
        arguments = ["--prompt", PROMPT, "--max-new-tokens", 12, "--seed", seed, "--json"]
        assert run("generate", "--model", tiny_folder, "--dtype", "float32", *arguments) == 0
        return json.loads(capsys.readouterr().out)["token_ids"]

    assert tokens(1) == tokens(1) != tokens(2)


def test_chat_streams_answers(tiny_folder, tokenizer, tiny, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is a list?\n\nAnd a dict?\n/exit\nnever read\n"))
    arguments = ["chat", "--model", tiny_folder, "--dtype", "float32", "--greedy", "--max-new-tokens", 12]
    assert run(*arguments) == 0
    conversation = Conversation(tiny, tokenizer, do_sample=False, max_new_tokens=12)
    answers = [conversation.say(text) for text in ("What is a list?", "And a dict?")]
    assert capsys.readouterr().out == "".join(f"{answer}\n" for answer in answers)


def test_conversation_continues_from_its_cache(tiny, tokenizer):
    conversation = Conversation(tiny, tokenizer, do_sample=False, max_new_tokens=12)
    conversation.say("What is a list?")
    cache = conversation._cache
    answer = conversation.say("And a dict?")
    assert conversation._cache is cache
    prompt = tokenizer.apply_chat_template(
        conversation.messages[:3], add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).input_ids
    output = tiny.generate(prompt, cache=tiny.new_cache(1, ROOM), do_sample=False, max_new_tokens=12)
    assert tokenizer.decode(output[0, prompt.shape[1] :], skip_special_tokens=True) == answer


def test_conversation_starts_anew_where_history_changed(tiny, tokenizer):
    conversation = Conversation(tiny, tokenizer, do_sample=False, max_new_tokens=4)
    conversation.say("What is a list?")
    cache = conversation._cache
    seen = conversation._seen
    assert conversation._cache_for(torch.cat([seen, seen], dim=1)) is cache
    changed = torch.cat([seen, seen], dim=1)
    changed[0, 3] += 1
    assert conversation._cache_for(changed) is not cache
    assert conversation._cache_for(seen[:, :-2]) is not cache


def test_conversation_needs_a_chat_template(tiny, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with pytest.raises(ValueError, match="no chat template"):
        Conversation(tiny, tokenizer)


def test_bench_measures_both(tiny_folder, capsys):
    sizes = ["--batch", "1", "--prompt-tokens", 8, "--new-tokens", 8, "--prefill-tokens", 40, "--pairs", 1]
    assert run("bench", "--model", tiny_folder, *sizes, "--against", "transformers", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    (row,) = report["generate"]
    assert row["batch"] == 1 and report["prefill"]["tokens"] == 40 and report["dtype"] == "float32"
    for measured in (row, report["prefill"]):
        assert measured["ratio"] == pytest.approx(measured["torchqwen_tpu"] / measured["transformers"])


def test_bench_table():
    report = {
        "model": "M", "dtype": "float32", "devices": 1, "layout": "dp", "prompt_tokens": 32, "new_tokens": 64,
        "unit": "tokens/s",
        "generate": [{"batch": 8, "torchqwen_tpu": 1234.5, "transformers": 100.0, "ratio": 12.345}], "prefill": None,
    }  # fmt: skip
    assert format_table(report).splitlines()[1:] == [
        "                           torchqwen_tpu    transformers     ratio",
        "generate, batch 8                1,234.5           100.0    12.35x",
    ]


def test_evaluate_prints_the_table_and_writes_the_results(tiny_folder, tmp_path, capsys):
    documents = [{"context": "import", "choices": [" os\n", "zzzzz"], "label": 0}] * 3
    (tmp_path / "lines.jsonl").write_text("\n".join(json.dumps(document) for document in documents))
    (tmp_path / "lines.yaml").write_text(
        f"task: lines\ndataset_path: json\ndataset_kwargs: {{data_files: {tmp_path / 'lines.jsonl'}}}\n"
        "test_split: train\noutput_type: multiple_choice\ndoc_to_text: '{{context}}'\ndoc_to_choice: '{{choices}}'\n"
        "doc_to_target: '{{label}}'\ntarget_delimiter: ''\nmetric_list: [{metric: acc}]\n"
    )
    arguments = ["--model", tiny_folder, "--tasks", "lines", "--include-path", tmp_path, "--limit", 2, "--log-samples"]
    assert run("evaluate", *arguments, "--output", tmp_path / "out" / "results.json") == 0
    assert "|lines" in capsys.readouterr().out
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["results"]["lines"]["acc,none"] == 1.0 and len(results["samples"]["lines"]) == 2


def test_bench_serve(tiny_folder, capsys):
    sizes = ["--input-len", 20, "--output-len", 9, "--concurrency", 2, "--requests", 3, "--mixed"]
    assert run("bench", "serve", "--model", tiny_folder, *sizes, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["requests"] == 3 and report["compilations"] == 0 and report["mixed"]
    assert report["total_tokens_per_second"] > report["output_tokens_per_second"] > 0
    for latency in ("time_to_first_token", "time_per_output_token"):
        assert 0 < report[latency]["p50"] <= report[latency]["p99"]
    assert report["step"]["device_seconds"] > 0 and 0 < report["page_use"] <= 1 and 0 < report["slot_use"] <= 1
    lines = format_serving({**report, "ratio": 2.0, "transformers": {"output_tokens_per_second": 1.0}})
    assert "2.0x" in lines and "p99" in lines
