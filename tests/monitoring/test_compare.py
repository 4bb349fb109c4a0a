"""One text under two configurations, chunk by chunk, and its command."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from support import random_rows, reference_logits

from torchqwen_tpu.cli import main
from torchqwen_tpu.config import ParallelConfig
from torchqwen_tpu.monitoring.compare import compare, comparison_page, format_comparison
from torchqwen_tpu.monitoring.sides import build_sides, parse_settings

TOKENS = np.array(random_rows((100,), seed=70)[0])


def compared(folder, a: str, b: str, chunk: int = 32, dtype: str = "float32"):
    settings = parse_settings(a), parse_settings(b)
    sides = build_sides(settings, str(folder), dtype, ParallelConfig(), len(TOKENS))
    return compare(sides, TOKENS, chunk, (a, b), progress=False)


def test_a_configuration_equals_itself(small_folder):
    result = compared(small_folder, "", "")
    assert result.kl.shape == (100,) and result.error.shape == (3, 100)
    assert np.all(result.error == 0) and result.agrees.all()


def test_ours_and_transformers(small_folder, small_reference):
    """Layers and outputs agree over chunks, and the likelihood is that of one forward in transformers."""
    result = compared(small_folder, "", "implementation=transformers")
    assert result.relative_rmse().max() < 1e-5
    assert np.abs(result.kl).max() < 1e-6
    logits = reference_logits(small_reference, TOKENS.tolist())
    expected = logits.log_softmax(-1)[:-1].gather(1, torch.from_numpy(TOKENS[1:, None]))[:, 0]
    for logprob in (result.logprob_a, result.logprob_b):
        np.testing.assert_allclose(logprob, expected, atol=1e-4)


def test_rounded_states_come_apart_once_they_are_stored(small_folder):
    """In the first chunk nothing has been stored yet; the first layer has a state of its own, so it moves too."""
    result = compared(small_folder, "state_dtype=float32", "state_dtype=bfloat16")
    first, rest = result.relative_rmse(0, 32), result.relative_rmse(32)
    assert first.max() < 1e-6
    assert 1e-6 < rest[0] < 1e-2 and rest[-1] > 1e-6
    assert result.kl[32:].max() > result.kl[:32].max()


def test_reports(small_folder):
    result = compared(small_folder, "state_dtype=float32", "state_dtype=bfloat16")
    summary = json.loads(json.dumps(result.summary()))
    assert len(summary["relative_rmse"]) == 3
    stretches = summary["by_position"]
    assert stretches[0]["first"] == 0 and stretches[-1]["last"] == 99
    assert all(one["last"] + 1 == other["first"] for one, other in zip(stretches, stretches[1:], strict=False))
    assert comparison_page(result).count("<svg") == 2
    assert "state_dtype=bfloat16" in format_comparison(result)


@pytest.mark.parametrize(
    "text", ["state_type=float32", "state_dtype", "state_dtype=float16", "prefill_chunk=many", "round_router=1",
             "implementation=jax", "implementation=transformers,page_size=64", "page_size=64,page_size=32"],
)  # fmt: skip
def test_settings_that_make_no_sense(text):
    with pytest.raises(ValueError, match=r"state|chunk|router|implementation|page_size"):
        parse_settings(text)


def test_settings():
    settings = parse_settings("dtype=bfloat16, page_size=32,round_router=true,implementations.gated_delta_net=reference")
    assert (settings.dtype, settings.runtime.page_size, settings.runtime.round_router) == ("bfloat16", 32, True)
    assert settings.runtime.implementations == {"gated_delta_net": "reference"}


def test_lengths_that_do_not_fit(small_folder):
    side = type("Short", (), {"limit": 50})()
    with pytest.raises(ValueError, match="50"):
        compare((side, side), TOKENS, 32)
    with pytest.raises(ValueError, match="at least 2"):
        compare((side, side), TOKENS[:1], 32)


COMMAND = ["compare", "--model", "MODEL", "--a", "state_dtype=float32", "--b", "state_dtype=bfloat16"]


def test_command(tiny_folder, tmp_path, capsys):
    text, figures, report = tmp_path / "text", tmp_path / "figures.json", tmp_path / "report.html"
    text.write_text("import os\n" * 60)
    command = [str(tiny_folder) if part == "MODEL" else part for part in COMMAND]
    options = ["--length", "100", "--chunk", "64", "--input", str(text), "--json", str(figures), "--report", str(report)]
    assert main([*command, *options]) == 0
    assert "KL" in capsys.readouterr().out
    assert json.loads(figures.read_text())["length"] == 100
    assert report.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("options", "named"),
    [(["--a", "size=3"], "size"), (["--input", "short"], "length"), (["--input", "missing"], "missing")],
)
def test_command_with_bad_input(tiny_folder, tmp_path, monkeypatch, capsys, options, named):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short").write_text("import os\n")
    command = [str(tiny_folder) if part == "MODEL" else part for part in COMMAND]
    assert main([*command, *options]) == 2
    error = capsys.readouterr().err
    assert named in error and error.count("\n") == 1
