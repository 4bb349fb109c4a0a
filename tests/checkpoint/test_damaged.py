"""Checkpoints that do not fit or are damaged: an error names the file or the tensor before any weight is read."""

from __future__ import annotations

import json
import struct

import pytest
import torch
from checkpoints import WHOLE, load, shard_name, tensors_of, unfuse, write_index
from safetensors.torch import save_file

from torchqwen_tpu.checkpoint.files import INDEX, CheckpointError, CheckpointFiles
from torchqwen_tpu.checkpoint.host import first_not_finite

A_LOG = WHOLE + "layers.0.linear_attn.A_log"
QUERY = WHOLE + "layers.1.self_attn.q_proj.weight"
EXPERTS = WHOLE + "layers.1.mlp.experts."
SHARDS = 3


@pytest.fixture
def refused(reads):
    """Asserts that a folder is refused with an error that names all of `names`, and that no weight was read."""

    def check(folder, *names):
        with pytest.raises(CheckpointError) as error:
            load(folder)
        assert all(name in str(error.value) for name in names), str(error.value)
        assert not reads

    return check


@pytest.mark.parametrize(
    "name", [A_LOG, QUERY, WHOLE + "embed_tokens.weight", WHOLE + "norm.weight", EXPERTS + "down_proj"]
)
def test_missing_tensor(checkpoint, tmp_path, refused, name):
    folder = checkpoint.write(tmp_path, change=lambda tensors: tensors.pop(name))
    refused(folder, name.removeprefix(WHOLE))


def test_missing_expert(checkpoint, tmp_path, refused):
    def change(tensors):
        unfuse(tensors)
        del tensors[EXPERTS + "3.up_proj.weight"], tensors[EXPERTS + "5.down_proj.weight"]

    folder = checkpoint.write(tmp_path, change=change)
    refused(folder, "layers.1.mlp.experts.3.up_proj", "layers.1.mlp.experts.5.down_proj")


@pytest.mark.parametrize(
    "name",
    [
        "model.language_model.layers.7.input_layernorm.weight",
        "model.language_model.layers.0.mlp.experts.gate_up_proj_scale_inv",
        "model.language_model.layers.1.linear_attn.A_log",
        "model.language_model.layers.1.self_attn.q_proj.bias",
        "language.norm.weight",
    ],
)
def test_unexpected_tensor(checkpoint, tmp_path, refused, name):
    refused(checkpoint.write(tmp_path, change=lambda tensors: tensors.update({name: torch.zeros(2)})), name)


def test_expert_beyond_the_last(checkpoint, tmp_path, refused):
    def change(tensors):
        unfuse(tensors)
        tensors[EXPERTS + "8.up_proj.weight"] = tensors[EXPERTS + "7.up_proj.weight"].clone()

    refused(checkpoint.write(tmp_path, change=change), EXPERTS + "8.up_proj.weight")


@pytest.mark.parametrize(
    "name", [A_LOG, QUERY, EXPERTS + "gate_up_proj", WHOLE + "layers.0.linear_attn.in_proj_qkv.weight"]
)
def test_wrong_shape(checkpoint, tmp_path, refused, name):
    shape = list(checkpoint.tensors[name].shape)
    folder = checkpoint.write(tmp_path, change=lambda tensors: tensors.update({name: tensors[name][1:].clone()}))
    refused(folder, name, str(shape), str([shape[0] - 1, *shape[1:]]))


def test_transposed_matrix(checkpoint, tmp_path, refused):
    refused(checkpoint.write(tmp_path, change=lambda tensors: tensors.update({QUERY: tensors[QUERY].t()})), QUERY)


def test_wrong_shape_of_an_expert(checkpoint, tmp_path, refused):
    name = EXPERTS + "2.gate_proj.weight"

    def change(tensors):
        unfuse(tensors)
        tensors[name] = tensors[name][:, 1:].clone()

    refused(checkpoint.write(tmp_path, change=change), name)


def test_both_prefixes_at_once(checkpoint, tmp_path, refused):
    name = "model." + QUERY.removeprefix(WHOLE)
    folder = checkpoint.write(tmp_path, change=lambda tensors: tensors.update({name: tensors[QUERY].clone()}))
    refused(folder, name, QUERY)


def test_fused_and_single_experts_at_once(checkpoint, tmp_path, refused):
    def change(tensors):
        fused = tensors[EXPERTS + "down_proj"].clone()
        unfuse(tensors)
        tensors[EXPERTS + "down_proj"] = fused

    refused(checkpoint.write(tmp_path, change=change), "model.layers.1.mlp.experts.down_proj", EXPERTS + "0.down_proj")


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.int64, torch.float64], ids=str
)
def test_dtype_that_is_no_weight(checkpoint, tmp_path, refused, dtype):
    refused(checkpoint.write(tmp_path, change=lambda tensors: tensors.update({QUERY: tensors[QUERY].to(dtype)})), QUERY)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", [A_LOG, QUERY, EXPERTS + "gate_up_proj", WHOLE + "norm.weight"])
def test_weight_that_is_not_finite(checkpoint, tmp_path, name, value):
    place = [length - 1 for length in checkpoint.tensors[name].shape]

    def change(tensors):
        tensors[name] = tensors[name].clone()
        tensors[name][tuple(place)] = value

    folder = checkpoint.write(tmp_path, SHARDS, change)
    with pytest.raises(CheckpointError) as error:
        load(folder)
    message = f"holds {value} at {place}"
    assert name in str(error.value) and "-of-00003.safetensors" in str(error.value) and message in str(error.value)


@pytest.mark.parametrize("name", [QUERY, EXPERTS + "down_proj"])
def test_weight_that_float16_cannot_hold(checkpoint, tmp_path, name):
    def change(tensors):
        tensors[name] = tensors[name].clone()
        tensors[name].view(-1)[-1] = 1e6

    folder = checkpoint.write(tmp_path, change=change)
    with pytest.raises(CheckpointError, match=f"{name} .* float16"):
        load(folder, dtype="float16")
    load(folder)


@pytest.mark.parametrize(
    ("dtype", "integer"),
    [(torch.float8_e4m3fn, torch.uint8), (torch.bfloat16, torch.int16), (torch.float16, torch.int16)], ids=str,
)  # fmt: skip
def test_every_number_that_is_not_finite_is_found(dtype, integer):
    """By itself among all that are finite."""
    bits = torch.arange(1 << 8 * dtype.itemsize).to(integer)
    is_finite = torch.isfinite(bits.view(dtype).float())
    finite, wrong = bits[is_finite], bits[~is_finite]
    assert first_not_finite(finite.view(dtype)) is None and len(wrong) >= 2
    for number in wrong:
        assert first_not_finite(torch.cat([finite[:9], number.view(1), finite[9:]]).view(dtype)) == [9]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), -float("nan")])
def test_float32_that_is_not_finite_is_found(value):
    tensor = torch.tensor([[3e38, -3e38, 0.0], [1.0, value, -0.0]])
    assert first_not_finite(tensor) == [1, 1] and first_not_finite(tensor[:1]) is None
    assert first_not_finite(tensor[:0]) is None


def test_file_that_is_cut_short_after_it_was_opened(checkpoint, tmp_path):
    """An error that names file and tensor, in place of a process that ends."""
    folder = checkpoint.write(tmp_path)
    files = CheckpointFiles(folder)
    last = list(files.tensors)[-1]
    file = folder / "model.safetensors"
    file.write_bytes(b"")
    with pytest.raises(CheckpointError, match=f"{file} is truncated: .* {last}"):
        files.read(last)


def test_tensor_in_two_shards(checkpoint, tmp_path, refused):
    folder = checkpoint.write(tmp_path, SHARDS)
    for number in (0, 1):
        file = folder / shard_name(number, SHARDS)
        names = json.loads(file.read_bytes()[8:].split(b"}}")[0] + b"}}")
        tensors = {name: tensor for name, tensor in tensors_of(folder).items() if name in names}
        save_file({**tensors, A_LOG: checkpoint.tensors[A_LOG]}, file)
    refused(folder, A_LOG, shard_name(0, SHARDS), shard_name(1, SHARDS))


@pytest.mark.parametrize("number", range(SHARDS))
def test_missing_shard(checkpoint, tmp_path, refused, number):
    folder = checkpoint.write(tmp_path, SHARDS)
    (folder / shard_name(number, SHARDS)).unlink()
    refused(folder, shard_name(number, SHARDS))


def test_index_names_an_absent_file(checkpoint, tmp_path, refused):
    folder = checkpoint.write(tmp_path, SHARDS)
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    write_index(folder, {**weight_map, A_LOG: "model-00009-of-00009.safetensors"})
    refused(folder, "model-00009-of-00009.safetensors", INDEX)


def test_index_places_a_tensor_in_the_wrong_file(checkpoint, tmp_path, refused):
    folder = checkpoint.write(tmp_path, SHARDS)
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    wrong = next(file for file in sorted(set(weight_map.values())) if file != weight_map[A_LOG])
    write_index(folder, {**weight_map, A_LOG: wrong})
    refused(folder, A_LOG, wrong)


def test_index_names_a_tensor_that_no_file_holds(checkpoint, tmp_path, refused):
    folder = checkpoint.write(tmp_path, SHARDS)
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    write_index(folder, {**weight_map, WHOLE + "extra": shard_name(0, SHARDS)})
    refused(folder, WHOLE + "extra", shard_name(0, SHARDS))


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 1}}', "\x80"], ids=repr)
def test_index_that_is_none(checkpoint, tmp_path, refused, text):
    folder = checkpoint.write(tmp_path, SHARDS)
    (folder / INDEX).write_text(text, encoding="latin-1")
    refused(folder, INDEX)


def test_no_weights_at_all(checkpoint, tmp_path, refused):
    folder = checkpoint.write(tmp_path)
    (folder / "model.safetensors").unlink()
    refused(folder, str(folder))


@pytest.mark.parametrize("shards", [1, SHARDS])
@pytest.mark.parametrize(
    "keep", ["nothing", "4 bytes", "8 bytes", "half the header", "header", "half", "all but a byte"]
)
def test_truncated_file(checkpoint, tmp_path, refused, shards, keep):
    folder = checkpoint.write(tmp_path, shards)
    file = folder / ("model.safetensors" if shards == 1 else shard_name(1, shards))
    data = file.read_bytes()
    header = 8 + struct.unpack("<Q", data[:8])[0]
    length = {
        "nothing": 0,
        "4 bytes": 4,
        "8 bytes": 8,
        "half the header": header // 2,
        "header": header,
        "half": (header + len(data)) // 2,
        "all but a byte": len(data) - 1,
    }[keep]
    file.write_bytes(data[:length])
    refused(folder, file.name)


@pytest.mark.parametrize("shards", [1, SHARDS])
def test_truncated_at_ten_places(checkpoint, tmp_path, refused, shards):
    """Wherever the data end, the error names a tensor that is not whole."""
    folder = checkpoint.write(tmp_path, shards)
    file = folder / ("model.safetensors" if shards == 1 else shard_name(1, shards))
    data = file.read_bytes()
    start = 8 + struct.unpack("<Q", data[:8])[0]
    places = json.loads(data[8:start])
    for tenth in range(10):
        length = start + (len(data) - start) * tenth // 10
        file.write_bytes(data[:length])
        cut = min((entry["data_offsets"], name) for name, entry in places.items() if start + entry["data_offsets"][1] > length)
        refused(folder, file.name, cut[1])


def rewrite_header(file, change) -> None:
    """`change` edits the header, which is parsed; the data stay."""
    data = file.read_bytes()
    start = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:start])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[start:])


@pytest.mark.parametrize(
    "entry",
    [
        {"data_offsets": [0, 4]},
        {"data_offsets": [2, 258]},
        {"data_offsets": [1 << 40, (1 << 40) + 256]},
        {"data_offsets": [256, 0]},
        {"data_offsets": [-256, 0]},
        {"data_offsets": [0.0, 256.0]},
        {"data_offsets": [0]},
        {"data_offsets": None},
        {"shape": [-4, -64]},
        {"shape": [1 << 62, 4]},
        {"shape": "64"},
        {"dtype": "F4"},
        {"dtype": 16},
        {"dtype": "F64"},
    ],
    ids=str,
)
def test_header_that_says_what_cannot_be(checkpoint, tmp_path, refused, entry):
    folder = checkpoint.write(tmp_path, SHARDS)
    file = next(file for file in folder.glob("*.safetensors") if QUERY.encode() in file.read_bytes())
    rewrite_header(file, lambda header: header[QUERY].update(entry))
    refused(folder, file.name, QUERY)


@pytest.mark.parametrize("how", ["overlap", "gap", "bytes after the last"])
def test_data_that_do_not_fill_the_file(checkpoint, tmp_path, refused, how):
    folder = checkpoint.write(tmp_path, SHARDS)
    file = folder / shard_name(0, SHARDS)
    if how == "bytes after the last":
        file.write_bytes(file.read_bytes() + b"x")
        refused(folder, file.name)
        return

    moved = []

    def change(header):
        moved.extend(sorted(header, key=lambda name: header[name]["data_offsets"])[1:])
        for name in moved:
            offsets = header[name]["data_offsets"]
            header[name]["data_offsets"] = [offset + (2 if how == "gap" else -2) for offset in offsets]

    rewrite_header(file, change)
    refused(folder, file.name, moved[0])


def test_tensor_twice_in_one_header(checkpoint, tmp_path, refused):
    folder = checkpoint.write(tmp_path)
    file = folder / "model.safetensors"
    data = file.read_bytes()
    start = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:start])
    text = data[8:start].rstrip()[:-1] + f', "{A_LOG}": {json.dumps(header[A_LOG])}}}'.encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[start:])
    refused(folder, file.name, A_LOG)


@pytest.mark.parametrize("damage", ["length", "json", "offsets", "a page of the web"])
def test_corrupt_header(checkpoint, tmp_path, refused, damage):
    folder = checkpoint.write(tmp_path, SHARDS)
    file = folder / shard_name(2, SHARDS)
    data = bytearray(file.read_bytes())
    if damage == "length":
        data[:8] = struct.pack("<Q", 1 << 60)
    elif damage == "json":
        data[8:12] = b"\xff{{]"
    elif damage == "offsets":
        at = data.index(b'"data_offsets":[') + len(b'"data_offsets":[')
        data[at : at + 1] = b"9"
    else:
        data = bytearray(b"<!DOCTYPE html><html>404</html>")
    file.write_bytes(data)
    refused(folder, file.name)
