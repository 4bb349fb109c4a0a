"""Texts to be scored from a JSONL file, and their scores as JSONL, Parquet or NumPy arrays."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from torchqwen_tpu.evaluation.batches import Request
from torchqwen_tpu.evaluation.scoring import TokenScores

SUFFIXES = (".jsonl", ".parquet", ".npz")
FORMS = '{"text": T} or {"prompt": P, "continuation": C}, each a string or a list of token ids'


def check_output(file: Path) -> None:
    """Raise ValueError for a name that stands for no format, or a format whose library is missing."""
    if file.suffix not in SUFFIXES:
        raise ValueError(f"{file} must end in {', '.join(SUFFIXES)}: the ending says which format is written")
    if file.suffix == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        raise ValueError("Parquet needs pyarrow: pip install 'torchqwen-tpu[eval]'; .jsonl and .npz need nothing more")


def read_requests(file: Path, tokenizer: PreTrainedTokenizerBase) -> tuple[list[Request], list[int]]:
    """Requests of a JSONL file, and the number of each one's line, from 1. Blank lines are left out.

    A text's first token is its context. An empty prompt stands for the token that begins a text, or else ends one.

    Raises:
        ValueError: a line that is no request, with the file and its number.
    """
    requests, lines = [], []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            requests.append(_request(json.loads(line), tokenizer))
        except ValueError as error:  # JSONDecodeError is one
            raise ValueError(f"{file}, line {number}: {error}") from error
        lines.append(number)
    if not requests:
        raise ValueError(f"{file} holds no line to score")
    return requests, lines


def _request(entry, tokenizer: PreTrainedTokenizerBase) -> Request:
    if isinstance(entry, dict) and set(entry) >= {"prompt", "continuation"}:
        prompt, continuation = entry["prompt"], entry["continuation"]
        if isinstance(prompt, str) and isinstance(continuation, str):
            context = tokenizer(prompt).input_ids  # the continuation's tokens are those of the whole text that follow
            rest = tokenizer(prompt + continuation).input_ids[len(context) :]
        else:
            context, rest = _ids("prompt", prompt, tokenizer), _ids("continuation", continuation, tokenizer)
        if not rest:
            raise ValueError("the continuation is empty; there is nothing to score")
        return context or [_first_token(tokenizer)], rest
    if isinstance(entry, dict) and "text" in entry:
        ids = _ids("text", entry["text"], tokenizer)
        if not ids:
            raise ValueError("the text is empty; there is nothing to score")
        return ids[:1], ids[1:]
    raise ValueError(f"a line must be {FORMS}")


def _first_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that begins a text, or else the one that ends one."""
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return token
    raise ValueError("the tokenizer has no token that begins or ends a text, and nothing precedes this one")


def _ids(name: str, value, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    if isinstance(value, str):
        return tokenizer(value).input_ids
    if not isinstance(value, list) or not all(type(token) is int and 0 <= token < len(tokenizer) for token in value):
        raise ValueError(f"{name} must be a string or a list of token ids below {len(tokenizer)}")
    return value


def write_scores(file: Path, scores: Sequence[TokenScores], lines: Sequence[int]) -> None:
    """Write scores in the format of the file's ending.

    .jsonl and .parquet: a record a request, `line` its line in the input, the rest by name as in `TokenScores`, a list entry
    a token; experts and router_weights are [token][layer][expert]. .npz: `line` [requests], `offset` [requests + 1] where
    each request's tokens begin, and the arrays of all tokens one after the other, [tokens, ...].
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    columns = [_columns(scored) for scored in scores]
    if file.suffix == ".npz":
        joined = {name: np.concatenate([column[name] for column in columns]) for name in columns[0]}
        offset = np.cumsum([0, *(len(scored.token_ids) for scored in scores)])
        np.savez_compressed(file, line=np.array(lines), offset=offset, **joined)
        return
    records = (
        {"line": line, **{name: array.tolist() for name, array in column.items()}}
        for line, column in zip(lines, columns, strict=True)
    )
    if file.suffix == ".jsonl":
        with file.open("w", encoding="utf-8") as output:
            output.writelines(f"{json.dumps(record)}\n" for record in records)
    else:
        _write_parquet(file, records, columns[0])


def _write_parquet(file: Path, records: Iterator[dict], example: dict[str, np.ndarray]) -> None:
    import pyarrow
    import pyarrow.parquet

    fields = [("line", pyarrow.int64())]
    for name, array in example.items():
        kind = pyarrow.from_numpy_dtype(array.dtype)
        for _ in array.shape:
            kind = pyarrow.list_(kind)
        fields.append((name, kind))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(records), schema=pyarrow.schema(fields)), file)


def _columns(scored: TokenScores) -> dict[str, np.ndarray]:
    """Arrays [tokens, ...] by name, those left out that were not asked for."""
    columns = {name: getattr(scored, name) for name in ("token_ids", "logprob", "rank", "entropy")}
    if scored.top_ids.shape[1]:
        columns |= {"top_ids": scored.top_ids, "top_logprobs": scored.top_logprobs}
    if scored.experts is not None:
        columns |= {name: np.moveaxis(getattr(scored, name), 0, 1) for name in ("experts", "router_weights")}
    return columns
