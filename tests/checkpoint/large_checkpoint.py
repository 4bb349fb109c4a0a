"""A generated FP8 checkpoint with the layers of 35B-A3B in full width, and what loading it costs; run on its own.

    python tests/checkpoint/large_checkpoint.py FOLDER [--layers 2] [--quantization keep] [--prepare]

Writes the checkpoint (0.85 GB a layer) unless FOLDER holds it, and prints JSON: the speed of `cat` and of the load on files
that are not in the page cache, and the most memory of the host that the load took beyond what the devices hold (which on a
CPU is host memory too, and taken off). With --prepare also the seconds of a load, of one that prepares, and of one that reads
what was prepared, files not in the page cache either.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2]), str(Path(__file__).parent)]
os.environ.setdefault("PJRT_DEVICE", "CPU")

import torch
from checkpoints import QUANTIZATION, QUANTIZED, write_index
from safetensors.torch import save_file
from transformers import Qwen3_5MoeConfig

CONFIG = Path(__file__).parents[1] / "data" / "configs" / "Qwen3.5-35B-A3B.json"
VOCABULARY = 4096
"""Cut, as the layers are few: with all of it the embedding would outweigh them."""


def large_config(layers: int) -> Qwen3_5MoeConfig:
    settings = json.loads(CONFIG.read_text())
    text = settings["text_config"]
    kinds = [("linear_attention", "full_attention")[number % 2] for number in range(layers)]
    text |= {"num_hidden_layers": layers, "layer_types": kinds, "vocab_size": VOCABULARY, "eos_token_id": 1}
    return Qwen3_5MoeConfig.from_dict({**settings, "text_config": text, "quantization_config": QUANTIZATION})


def write(folder: Path, layers: int) -> None:
    """A file a layer, experts one tensor each, random finite numbers; the last file holds what belongs to no layer."""
    from torchqwen_tpu import Qwen3_5MoeForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    config = large_config(layers)
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in Qwen3_5MoeForCausalLM(config).state_dict().items()}
    weight_map = {}
    for number in range(layers + 1):
        stem = f"model.layers.{number}."
        own = [name for name in shapes if (name.startswith(stem) if number < layers else ".layers." not in name)]
        tensors = {}
        for name in own:
            published = name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name
            tensors |= dict(_tensors(published, shapes[name]))
        file = f"model-{number + 1:05}-of-{layers + 1:05}.safetensors"
        save_file(tensors, folder / file)
        weight_map |= dict.fromkeys(tensors, file)
    write_index(folder, weight_map)
    config.save_pretrained(folder)


def _tensors(name: str, shape: torch.Size):
    if len(shape) == 3 and ".experts." in name:
        stem, _, part = name.rpartition(".")
        for expert in range(shape[0]):
            halves = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
            for half in halves:
                yield from _tensors(f"{stem}.{expert}.{half}.weight", torch.Size((shape[1] // len(halves), shape[2])))
    elif name.endswith(QUANTIZED):
        numbers = torch.randint(0, 256, shape, dtype=torch.uint8) & 0xBF  # below 2, so that none is NaN
        yield name, numbers.view(torch.float8_e4m3fn)
        yield name + "_scale_inv", torch.full([-(-length // 128) for length in shape], 0.01, dtype=torch.bfloat16)
    else:
        yield name, torch.randn(shape).to(torch.float32 if "A_log" in name or "attn.norm" in name else torch.bfloat16)


def drop_from_cache(files: list[Path]) -> None:
    for file in files:
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def resident(what: str) -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[what].split()[0]) << 10


def measure(folder: Path, quantization: str) -> dict:
    import torch_xla

    from torchqwen_tpu import AutoModelForCausalLM, RuntimeConfig
    from torchqwen_tpu.checkpoint.reader import READ_AHEAD

    torch.zeros(1).to(torch_xla.device()).cpu()  # the client and its threads are not the load's
    files = sorted(folder.glob("*.safetensors"))
    size = sum(file.stat().st_size for file in files)
    drop_from_cache(files)
    started = time.perf_counter()
    subprocess.run(["cat", *map(str, files)], stdout=subprocess.DEVNULL, check=True)
    cat = size / (time.perf_counter() - started)
    drop_from_cache(files)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before, busy = resident("VmRSS"), time.process_time()
    started = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(folder, runtime=RuntimeConfig(quantization=quantization))
    load = size / (time.perf_counter() - started)
    held = sum(value.numel() * value.element_size() for value in model.parameters())
    layer = sum(
        value.numel() * value.element_size() for name, value in model.named_parameters() if name.startswith("model.layers.0.")
    )
    return {
        "bytes": size,
        "cat_bytes_per_second": round(cat),
        "load_bytes_per_second": round(load),
        "load_processor_seconds": round(time.process_time() - busy, 2),
        "load_to_cat": round(load / cat, 3),
        "device_bytes": held,
        "layer_bytes": layer,
        "read_ahead_bytes": READ_AHEAD,
        "host_bytes_beyond_devices": resident("VmHWM") - before - held,
    }


def measure_prepared(folder: Path, quantization: str) -> dict:
    from torchqwen_tpu import AutoModelForCausalLM, RuntimeConfig

    seconds = {}
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        target = Path(temporary) / "prepared"
        for name, source, options in (
            ("load", folder, {}), ("load_and_prepare", folder, {"save_prepared": target}),
            ("load_prepared", folder, {"save_prepared": target}), ("load_prepared_alone", target, {}),
        ):  # fmt: skip
            drop_from_cache([*folder.glob("*.safetensors"), *target.glob("*.safetensors")])
            started = time.perf_counter()
            AutoModelForCausalLM.from_pretrained(source, runtime=RuntimeConfig(quantization=quantization), **options)
            seconds[f"{name}_seconds"] = round(time.perf_counter() - started, 2)
        seconds["prepared_bytes"] = sum(file.stat().st_size for file in target.iterdir())
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--quantization", default="keep")
    parser.add_argument("--prepare", action="store_true")
    options = parser.parse_args()
    if not (options.folder / "config.json").exists():
        write(options.folder, options.layers)
    result = measure(options.folder, options.quantization)
    if options.prepare:
        result |= measure_prepared(options.folder, options.quantization)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
