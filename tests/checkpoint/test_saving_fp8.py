"""save_pretrained in BF16 and FP8: what is lost and what is not, and what is left when it does not come to its end."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from checkpoints import (
    WHOLE,
    assert_same,
    dequantized,
    load,
    published_state,
    quantized,
    random_checkpoint,
    tensors_of,
    whole_config,
    wide_config,
)  # fmt: skip
from support import padded, random_rows, reference_logits

from torchqwen_tpu import RuntimeConfig
from torchqwen_tpu.checkpoint.atomic import PARTIAL

SCRIPT = Path(__file__).parent / "saves_that_die.py"


def kept(folder):
    return load(folder, runtime=RuntimeConfig(quantization="keep"))


@pytest.fixture(scope="module")
def plain():
    return random_checkpoint(wide_config(), seed=5)


@pytest.fixture(scope="module")
def fp8(plain):
    return quantized(plain)


@pytest.fixture(scope="module")
def fp8_folder(fp8, tmp_path_factory):
    return fp8.write(tmp_path_factory.mktemp("fp8"), shards=2)


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def assert_same_fp8(result, expected) -> None:
    names = [name for name in expected if expected[name].dtype == torch.float8_e4m3fn]
    assert names and all(result[name].dtype == torch.float8_e4m3fn for name in names)
    plain = [{**tensors, **{name: tensors[name].view(torch.uint8) for name in names}} for tensors in (result, expected)]
    assert_same(*plain)


@pytest.mark.parametrize("format", [None, "fp8"])
def test_kept_fp8_is_saved_as_it_was(fp8, fp8_folder, tmp_path, format):
    """Numbers and scales, their types too, and the tensors that are not built here."""
    kept(fp8_folder).save_pretrained(tmp_path, format=format)
    assert_same_fp8(tensors_of(tmp_path), fp8.tensors)
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"]["quant_method"] == "fp8"


@pytest.mark.parametrize("shard_size", ["5GB", 100_000], ids=["one file", "shards"])
@pytest.mark.parametrize(("source", "format"), [("fp8", None), ("fp8", "bf16"), ("plain", "fp8"), ("plain", "bf16")])
def test_saved_loaded_and_saved_is_the_same_to_the_byte(plain, fp8, tmp_path, source, format, shard_size):
    folder = (fp8 if source == "fp8" else plain).write(tmp_path / "source")
    for name in ("first", "second"):
        kept(folder).save_pretrained(tmp_path / name, max_shard_size=shard_size, format=format)
        folder = tmp_path / name
    assert bytes_of(tmp_path / "first") == bytes_of(tmp_path / "second")


def test_bf16_of_an_fp8_checkpoint(plain, fp8, fp8_folder, tmp_path):
    """All tensors in BF16 under the names of BF16 checkpoints, experts fused, those of the head that is not built too."""
    kept(fp8_folder).save_pretrained(tmp_path, format="bf16")
    saved = tensors_of(tmp_path)
    assert sorted(saved) == sorted(plain.tensors)
    assert all(saved[name].dtype == plain.tensors[name].dtype for name in saved)
    name = WHOLE + "layers.0.linear_attn.in_proj_qkv.weight"
    assert torch.equal(saved[name], dequantized(fp8, torch.bfloat16).tensors[name])
    assert torch.equal(saved["mtp.layers.0.mlp.experts.down_proj"][5], dequantized(fp8).tensors[
        "mtp.layers.0.mlp.experts.5.down_proj.weight"].bfloat16())  # fmt: skip
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())


def test_fp8_of_a_bf16_checkpoint(plain, tmp_path):
    """The same tensors as an independent quantisation writes."""
    load(plain.write(tmp_path / "plain")).save_pretrained(tmp_path / "fp8", format="fp8")
    assert_same_fp8(tensors_of(tmp_path / "fp8"), quantized(plain, torch.float32).tensors)


def test_transformers_loads_fp8_with_our_logits(tmp_path):
    """Of sizes that it can dequantise: several blocks have to be whole ones."""
    plain = random_checkpoint(whole_config())
    load(plain.write(tmp_path / "plain")).save_pretrained(tmp_path / "fp8", format="fp8")
    reference = transformers.Qwen3_5MoeForConditionalGeneration.from_pretrained(
        tmp_path / "fp8", dtype=torch.float32, quantization_config=transformers.FineGrainedFP8Config(dequantize=True)
    )
    (row,) = random_rows([9])
    logits = load(tmp_path / "fp8", dtype="float32")(**padded([row])).logits[0].cpu()
    torch.testing.assert_close(reference_logits(reference.eval(), row), logits, atol=1e-4, rtol=0)


def test_requantized_weights_are_not_saved(fp8_folder, tmp_path):
    model = load(fp8_folder, runtime=RuntimeConfig(quantization="channel"))
    for format in (None, "bf16", "fp8"):
        with pytest.raises(ValueError, match="quantization='keep'"):
            model.save_pretrained(tmp_path, format=format)
    assert not list(tmp_path.iterdir())


def test_no_such_format(fp8_folder, tmp_path):
    with pytest.raises(ValueError, match="bf16, fp8"):
        kept(fp8_folder).save_pretrained(tmp_path, format="int4")


def test_full_disk(plain, fp8_folder, tmp_path):
    """The error names file and tensor; the old checkpoint is there and nothing else."""
    folder = plain.write(tmp_path / "old")
    before = bytes_of(folder)
    model = kept(fp8_folder)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, hard))  # Python ignores SIGXFSZ: writing beyond is an OSError
    try:
        with pytest.raises(OSError, match=r"(model|mtp|lm_head)\S+ could not be written to model\S*\.safetensors: "):
            model.save_pretrained(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert bytes_of(folder) == before
    assert_same(published_state(load(folder)), plain.parameters())


def test_what_a_killed_save_leaves_is_cleared_by_the_next(plain, tmp_path):
    folder = plain.write(tmp_path)
    (folder / PARTIAL).mkdir()
    (folder / PARTIAL / "model.safetensors").write_bytes(b"half")
    (folder / "notes.txt").write_text("kept")
    load(folder).save_pretrained(folder)
    assert not (folder / PARTIAL).exists() and (folder / "notes.txt").exists()
    assert_same(tensors_of(folder), plain.tensors)


KILLED = {
    "one file": "100000:100000",
    "shards": "5000:5000",
    "shards to one file": "5000:100000",
    "one file to shards": "100000:5000",
}
"""Sizes of the shards of the old checkpoint and of the new one."""


@pytest.fixture(scope="module")
def left_behind(tmp_path_factory) -> dict[str, list[str]]:
    """By the sizes, the states that `saves_that_die.py` prints, all from one process."""
    command = [sys.executable, str(SCRIPT), str(tmp_path_factory.mktemp("killed")), *KILLED.values()]
    process = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert process.returncode == 0, process.stderr[-2000:]
    states: dict[str, list[str]] = {}
    for line in process.stdout.splitlines():
        if line in KILLED.values():
            own = states[line] = []
        else:
            own.append(line)
    return states


@pytest.mark.parametrize("sizes", KILLED.values(), ids=KILLED)
def test_kill_at_every_step(left_behind, sizes):
    """The old checkpoint up to a point, then nothing that loads, then the new one; never a mixture."""
    states = left_behind[sizes]
    assert len(states) > 8
    runs = [state for number, state in enumerate(states) if number == 0 or states[number - 1] != state]
    assert runs == ["old", "refused", "new"]
