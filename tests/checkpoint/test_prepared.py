"""Prepared checkpoints: written while a model is loaded, read in place of converting, and refused for anything else."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import (
    WHOLE,
    assert_same,
    load,
    published_state,
    quantized,
    random_checkpoint,
    tensors_of,
    wide_config,
)  # fmt: skip
from support import padded, random_rows

from torchqwen_tpu import ParallelConfig, RuntimeConfig
from torchqwen_tpu.checkpoint import prepared
from torchqwen_tpu.checkpoint.assemble import Assembler
from torchqwen_tpu.checkpoint.header import CheckpointError
from torchqwen_tpu.checkpoint.preparation import LAYOUT_VERSION
from torchqwen_tpu.cli import main
from torchqwen_tpu.config import QUANTIZATIONS

SCRIPT = Path(__file__).parent / "preparations_that_die.py"
KEEP = RuntimeConfig(quantization="keep")
FP8 = torch.float8_e4m3fn


@pytest.fixture(scope="module")
def fp8():
    return quantized(random_checkpoint(wide_config(), seed=11))


@pytest.fixture(scope="module")
def fp8_folder(fp8, tmp_path_factory):
    folder = fp8.write(tmp_path_factory.mktemp("fp8"), shards=2)
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 77}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "generation_config.json").write_text('{"eos_token_id": [4, 5], "top_k": 7}')
    return folder


@pytest.fixture
def converts(monkeypatch) -> list[str]:
    """Parameters that are put together from published tensors."""
    names: list[str] = []
    start = Assembler.start

    def recorded(self, filling, submit):
        names.append(filling.name)
        return start(self, filling, submit)

    monkeypatch.setattr(Assembler, "start", recorded)
    return names


def assert_same_bits(result, expected) -> None:
    plain = [
        {name: tensor.contiguous().view(torch.uint8) if tensor.dtype == FP8 else tensor for name, tensor in state.items()}
        for state in (result, expected)
    ]
    assert_same(*plain)


@pytest.fixture(scope="module")
def prepared_folder(fp8_folder, tmp_path_factory):
    """Of FP8 weights that are kept, on one device, in BF16."""
    folder = tmp_path_factory.mktemp("prepared") / "kept"
    load(fp8_folder, runtime=KEEP, save_prepared=folder)
    return folder


@pytest.mark.parametrize("policy, scan_layers", [*((policy, False) for policy in QUANTIZATIONS), ("channel", True)])
def test_the_same_model_without_converting(tmp_path, converts, policy, scan_layers):
    """In the second start with the published folder, and with the prepared folder alone."""
    kinds = ["linear_attention", "full_attention"] * 2
    folder = quantized(random_checkpoint(wide_config(layer_types=kinds))).write(tmp_path / "published")
    runtime = RuntimeConfig(quantization=policy, scan_layers=scan_layers)
    first = load(folder, dtype="float32", runtime=runtime, save_prepared=tmp_path / "prepared")
    assert converts and any(":" in name for name, _ in first.named_parameters()) == scan_layers
    converts.clear()
    row = padded(random_rows([9]))
    for again in (
        load(folder, dtype="float32", runtime=runtime, save_prepared=tmp_path / "prepared"),
        load(tmp_path / "prepared"),
    ):
        assert_same_bits(published_state(again), published_state(first))
        assert again.requantization_error == first.requantization_error and again.dtype == first.dtype
        assert torch.equal(again(**row).logits.cpu(), first(**row).logits.cpu())
    assert not converts


def test_the_folder_alone_suffices(fp8_folder, prepared_folder, tmp_path):
    """Tokenizer, chat template and stop tokens come along, and what is saved is what the published checkpoint holds."""
    for name in ("tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (prepared_folder / name).read_bytes() == (fp8_folder / name).read_bytes()
    model = load(prepared_folder)
    assert model.generation_config.eos_token_id == [4, 5] and model.generation_config.top_k == 7
    model.save_pretrained(tmp_path / "saved")
    load(fp8_folder, runtime=KEEP).save_pretrained(tmp_path / "expected")
    assert_same_bits(tensors_of(tmp_path / "saved"), tensors_of(tmp_path / "expected"))
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"]["quant_method"] == "fp8"


def test_a_checkpoint_without_fp8_has_no_policy(tmp_path):
    checkpoint = random_checkpoint(wide_config())
    folder = checkpoint.write(tmp_path / "published")
    load(folder, save_prepared=tmp_path / "prepared")
    again = load(folder, runtime=KEEP, save_prepared=tmp_path / "prepared")
    assert_same(published_state(again), checkpoint.parameters())
    load(tmp_path / "prepared", runtime=KEEP)


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("dtype float32", {"dtype": "bfloat16", "runtime": KEEP}),
        ("quantization keep", {"dtype": "float32", "runtime": RuntimeConfig(quantization="channel")}),
        ("scan_layers False", {"dtype": "float32", "runtime": RuntimeConfig(quantization="keep", scan_layers=True)}),
        ("mesh 1x1 dp", {"dtype": "float32", "runtime": KEEP, "parallel": ParallelConfig(1, 1, "tp")}),
    ],
    ids=["dtype", "quantization", "scan_layers", "mesh"],
)
def test_refused_for_anything_else(fp8_folder, tmp_path, field, arguments):
    """With the published folder and alone."""
    target = tmp_path / "prepared"
    load(fp8_folder, dtype="float32", runtime=KEEP, save_prepared=target)
    for folder, options in ((fp8_folder, {"save_prepared": target}), (target, {})):
        with pytest.raises(CheckpointError, match=f"{target} was prepared with {field}, and"):
            load(folder, **arguments, **options)


def test_refused_for_another_layout(prepared_folder, monkeypatch):
    version = LAYOUT_VERSION
    monkeypatch.setattr("torchqwen_tpu.models.causal_lm.LAYOUT_VERSION", version + 1)
    with pytest.raises(CheckpointError, match=rf"was prepared with layout_version {version}, and {version + 1} is asked for"):
        load(prepared_folder)


def _trained_further(tensors):
    name = WHOLE + "layers.1.input_layernorm.weight"
    tensors[name] = tensors[name] * 1.01


def _larger_weight(tensors):
    """Changed in the middle of a tensor that is longer than what the hash takes in of it."""
    name = WHOLE + "embed_tokens.weight"
    tensors[name] = tensors[name].clone()
    tensors[name][48, 0] += 1


def _other_scales(tensors):
    name = WHOLE + "layers.0.mlp.experts.3.up_proj.weight_scale_inv"
    tensors[name] = tensors[name].float()


@pytest.mark.parametrize("change", [_trained_further, _larger_weight, _other_scales])
def test_refused_for_another_checkpoint(fp8, prepared_folder, tmp_path, change):
    with pytest.raises(CheckpointError, match="was prepared with checkpoint "):
        load(fp8.write(tmp_path, 2, change), runtime=KEEP, save_prepared=prepared_folder)


def test_refused_for_another_configuration(fp8, prepared_folder, tmp_path):
    folder = fp8.write(tmp_path, 2)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False, "note": 1}))
    with pytest.raises(CheckpointError, match="was prepared with checkpoint "):
        load(folder, runtime=KEEP, save_prepared=prepared_folder)


def test_a_copy_in_another_place_is_the_same_checkpoint(fp8, fp8_folder, prepared_folder, tmp_path, converts):
    folder = fp8.write(tmp_path, 2)
    assert (folder / "config.json").read_bytes() == (fp8_folder / "config.json").read_bytes()
    load(folder, runtime=KEEP, save_prepared=prepared_folder)
    assert not converts


def test_a_folder_that_holds_something_else(fp8_folder, tmp_path, reads):
    (tmp_path / "notes.txt").write_text("kept")
    for target in (tmp_path, tmp_path / "notes.txt", fp8_folder):
        with pytest.raises(ValueError, match=f"{target} is there and is no prepared checkpoint"):
            load(fp8_folder, save_prepared=target)
    assert not reads and (tmp_path / "notes.txt").read_text() == "kept"


def test_an_empty_folder_is_taken(fp8_folder, tmp_path):
    load(fp8_folder, save_prepared=tmp_path)
    load(tmp_path)
    assert not list(tmp_path.parent.glob("*.partial"))


def test_a_prepared_checkpoint_is_not_prepared_again(prepared_folder, tmp_path):
    with pytest.raises(ValueError, match="load it without save_prepared"):
        load(prepared_folder, save_prepared=tmp_path / "again")


def damage(folder: Path, how: str) -> str:
    """Returns the file or the tensor that the error names."""
    (file,) = folder.glob("prepared-*.safetensors")
    data = file.read_bytes()
    if how == "truncated":
        file.write_bytes(data[: len(data) * 2 // 3])
    elif how == "missing":
        file.unlink()
    elif how == "renamed tensor":
        file.write_bytes(data.replace(b"model.norm.weight", b"model.form.weight"))
        return "model.norm.weight"
    elif how == "reshaped tensor":
        config = json.loads((folder / "config.json").read_text())
        config["text_config"]["vocab_size"] -= 1
        (folder / "config.json").write_text(json.dumps(config))
        return "model.embed_tokens.weight"
    else:
        (folder / prepared.DESCRIPTION).write_text(how)
        return prepared.DESCRIPTION
    return file.name


@pytest.mark.parametrize("how", ["truncated", "missing", "renamed tensor", "reshaped tensor", "{}", "{", "[1]"])
def test_damaged(fp8_folder, tmp_path, reads, how):
    load(fp8_folder, runtime=KEEP, save_prepared=tmp_path / "prepared")
    reads.clear()
    name = damage(tmp_path / "prepared", how)
    with pytest.raises(CheckpointError, match=name):
        load(tmp_path / "prepared")
    assert not reads


def test_a_file_of_another_preparation(fp8_folder, prepared_folder, tmp_path):
    """Of the same tensors in the same places, so that the headers alone would fit."""
    shutil.copytree(prepared_folder, tmp_path / "prepared")
    other = quantized(random_checkpoint(wide_config(), seed=12)).write(tmp_path / "published", shards=2)
    load(other, runtime=KEEP, save_prepared=tmp_path / "other")
    (file,) = (tmp_path / "other").glob("prepared-*.safetensors")
    assert file.stat().st_size == (prepared_folder / file.name).stat().st_size
    shutil.copyfile(file, tmp_path / "prepared" / file.name)
    with pytest.raises(CheckpointError, match=f"{tmp_path / 'prepared' / file.name} is not the file that"):
        load(tmp_path / "prepared")


def test_the_model_outlives_its_folder_and_leaves_it_alone(prepared_folder, tmp_path):
    """It computes from the pages of files: they may be removed, and new weights do not reach them."""
    shutil.copytree(prepared_folder, tmp_path / "prepared")
    (file,) = (tmp_path / "prepared").glob("prepared-*.safetensors")
    before, row = file.read_bytes(), padded(random_rows([9]))
    model = load(tmp_path / "prepared", runtime=KEEP)
    logits = model(**row).logits.cpu()
    state = published_state(model)
    model.load_state_dict({name: tensor.zero_() if "norm" in name else tensor for name, tensor in state.items()})
    assert not torch.equal(model(**row).logits.cpu(), logits) and file.read_bytes() == before
    again = load(tmp_path / "prepared", runtime=KEEP)
    shutil.rmtree(tmp_path / "prepared")
    assert torch.equal(again(**row).logits.cpu(), logits)


def test_tensors_lie_where_a_cpu_uses_them(prepared_folder):
    """All whose length allows it, and every other at its type's alignment."""
    for entry in prepared.PreparedFiles(prepared_folder).tensors.values():
        assert entry.bytes % 64 or entry.offset % 64 == 0
        assert entry.offset % prepared.DTYPES[entry.dtype].itemsize == 0


def test_full_disk(fp8_folder, tmp_path):
    """The error names file and tensor, and nothing is left."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, hard))  # Python ignores SIGXFSZ: writing beyond is an OSError
    try:
        with pytest.raises(OSError, match=r"\S+ could not be written to prepared-\d+\.safetensors: "):
            load(fp8_folder, save_prepared=tmp_path / "prepared")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())


def test_disk_that_is_too_small(fp8_folder, tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(prepared.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OSError, match="1,000 bytes free and the prepared checkpoint takes"):
        load(fp8_folder, runtime=KEEP, save_prepared=tmp_path / "prepared")
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_that_is_refused_leaves_nothing(fp8, tmp_path):
    def change(tensors):
        name = WHOLE + "layers.1.mlp.experts.7.down_proj.weight_scale_inv"
        tensors[name] = tensors[name] * 0

    folder = fp8.write(tmp_path / "published", change=change)
    with pytest.raises(CheckpointError, match="experts.7.down_proj.weight_scale_inv"):
        load(folder, save_prepared=tmp_path / "prepared")
    assert [path.name for path in tmp_path.iterdir()] == ["published"]


def test_killed_at_every_step(fp8_folder, tmp_path):
    """What is left does not load and the next start clears it away, up to a last step after which all is there."""
    process = subprocess.run(
        [sys.executable, str(SCRIPT), str(fp8_folder), str(tmp_path)], capture_output=True, text=True, timeout=300
    )
    states = process.stdout.split("\n")[:-1]
    assert process.returncode == 0 and len(states) > 8, process.stderr[-2000:]
    assert states == ["absent"] * (len(states) - 1) + ["whole"]


def test_command_line(tiny_folder, tmp_path, capsys):
    """The second start generates the same; another dtype is one line and status 2."""
    arguments = ["generate", "--prompt", "import", "--greedy", "--max-new-tokens", "3", "--save-prepared", str(tmp_path / "p")]
    answers = []
    for _ in range(2):
        assert main([*arguments, "--model", str(tiny_folder)]) == 0
        answers.append(capsys.readouterr().out)
    assert main([*arguments[:-2], "--model", str(tmp_path / "p")]) == 0
    assert {capsys.readouterr().out, *answers} == {answers[0]}
    assert main([*arguments, "--model", str(tiny_folder), "--dtype", "float32"]) == 2
    (error,) = capsys.readouterr().err.strip().splitlines()[-1:]
    assert "dtype bfloat16, and float32 is asked for" in error
