"""Scores of a file of texts, and how bad lines are refused."""

from __future__ import annotations

import json

import numpy as np
import pytest

from torchqwen_tpu.cli import main
from torchqwen_tpu.evaluation import score, score_requests

PROMPT, CONTINUATION = "import os\n", "import sys\n"


@pytest.fixture(scope="module")
def written(tiny_folder, tmp_path_factory):
    """Output files by ending, of a text, a blank line, a prompt with its continuation, ids and an empty prompt."""
    folder = tmp_path_factory.mktemp("scores")
    lines = [
        {"text": PROMPT + CONTINUATION},
        None,
        {"prompt": PROMPT, "continuation": CONTINUATION, "ignored": 1},
        {"prompt": [5, 6], "continuation": [7]},
        {"prompt": "", "continuation": "x"},
    ]
    (folder / "in.jsonl").write_text("".join("\n" if line is None else f"{json.dumps(line)}\n" for line in lines))
    files = {}
    for ending in (".jsonl", ".parquet", ".npz"):
        files[ending] = folder / "new" / f"out{ending}"
        command = ["score", "--model", tiny_folder, "--dtype", "float32", "--input", folder / "in.jsonl"]
        assert main([*map(str, command), "--output", str(files[ending]), "--top-k", "2", "--routers"]) == 0
    return files


def test_jsonl(written, tiny, tokenizer):
    records = [json.loads(line) for line in written[".jsonl"].read_text().splitlines()]
    assert [record["line"] for record in records] == [1, 3, 4, 5]
    (text,) = score(tiny, [PROMPT + CONTINUATION], tokenizer=tokenizer, top_k=2, routers=True)
    np.testing.assert_allclose(records[0]["logprob"], text.logprob, atol=1e-4)
    assert records[0]["token_ids"] == text.token_ids.tolist() and records[0]["rank"] == text.rank.tolist()
    assert records[0]["top_ids"] == text.top_ids.tolist()
    np.testing.assert_array_equal(np.moveaxis(records[0]["experts"], 1, 0), text.experts)
    context = tokenizer(PROMPT).input_ids
    (continuation,) = score_requests(tiny, [(context, tokenizer(PROMPT + CONTINUATION).input_ids[len(context) :])])
    np.testing.assert_allclose(records[1]["logprob"], continuation.logprob, atol=1e-4)
    assert records[2]["token_ids"] == [7] and len(records[3]["token_ids"]) == 1


def test_parquet_and_numpy_hold_the_same(written):
    parquet = pytest.importorskip("pyarrow.parquet")
    records = [json.loads(line) for line in written[".jsonl"].read_text().splitlines()]
    rows = parquet.read_table(written[".parquet"]).to_pylist()
    arrays = np.load(written[".npz"])
    assert arrays["line"].tolist() == [record["line"] for record in records]
    for row, record, first, last in zip(rows, records, arrays["offset"][:-1], arrays["offset"][1:], strict=True):
        assert set(row) == set(record) == (set(arrays) - {"offset"})
        for name in set(record) - {"line"}:
            np.testing.assert_allclose(row[name], record[name], atol=1e-4)
            np.testing.assert_allclose(arrays[name][first:last], record[name], atol=1e-4)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: "),
        ("[1]", "line 2: a line must be"),
        ('{"txt": "x"}', "line 2: a line must be"),
        ('{"text": ""}', "line 2: the text is empty"),
        ('{"text": [1, 99999999]}', "line 2: text must be"),
        ('{"text": [true]}', "line 2: text must be"),
        ('{"prompt": "x", "continuation": ""}', "line 2: the continuation is empty"),
        ('{"prompt": 3, "continuation": "x"}', "line 2: prompt must be"),
    ],
)
def test_a_bad_line_is_named(line, message, tiny_folder, tmp_path, capsys):
    file = tmp_path / "in.jsonl"
    file.write_text(f'{{"text": "fine"}}\n{line}\n')
    assert main(["score", "--model", str(tiny_folder), "--input", str(file), "--output", str(tmp_path / "o.npz")]) == 2
    error = capsys.readouterr().err
    assert f"{file}, {message}" in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "output", "message"),
    [("\n", "o.npz", "holds no line"), ('{"text": "x"}', "o.csv", "must end in"), (None, "o.npz", "No such file")],
)
def test_bad_files(content, output, message, tiny_folder, tmp_path, capsys):
    file = tmp_path / "in.jsonl"
    if content is not None:
        file.write_text(content)
    assert main(["score", "--model", str(tiny_folder), "--input", str(file), "--output", str(tmp_path / output)]) == 2
    assert message in capsys.readouterr().err
