"""A generated checkpoint with the layers of 35B-A3B in full width, and what loading it costs; run on its own.

    python tests/checkpoint/large_checkpoint.py FOLDER [--format fp8|bf16] [--layers 2] [--quantization keep] [--pairs 3]
                                                [--prepare]

Writes the checkpoint (a layer of 0.85 GB in FP8, of 1.7 GB in BF16) unless FOLDER holds it, and prints JSON. Every pair is a
run of `cat` over the files and a load of them, both of files that are not in the page cache, one right after the other: what
else the machine does changes both, and the median of the pairs' ratios is stated. Of every load also the processor time,
which depends less on that, and the most memory of the host that it took beyond what the devices hold (which on a CPU is host
memory too, and taken off). With --prepare also the processor time of loads with prepared files.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
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


def large_config(layers: int, is_fp8: bool) -> Qwen3_5MoeConfig:
    settings = json.loads(CONFIG.read_text())
    text = settings["text_config"]
    kinds = [("linear_attention", "full_attention")[number % 2] for number in range(layers)]
    text |= {"num_hidden_layers": layers, "layer_types": kinds, "vocab_size": VOCABULARY, "eos_token_id": 1}
    if is_fp8:
        settings["quantization_config"] = QUANTIZATION
    return Qwen3_5MoeConfig.from_dict({**settings, "text_config": text})


def write(folder: Path, layers: int, is_fp8: bool) -> None:
    """A file a layer, random finite numbers; the last file holds what belongs to no layer. Experts are one tensor each in FP8,
    and fused in BF16, as they are published."""
    from torchqwen_tpu import Qwen3_5MoeForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    config = large_config(layers, is_fp8)
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in Qwen3_5MoeForCausalLM(config).state_dict().items()}
    weight_map = {}
    for number in range(layers + 1):
        stem = f"model.layers.{number}."
        own = [name for name in shapes if (name.startswith(stem) if number < layers else ".layers." not in name)]
        tensors = {}
        for name in own:
            published = name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name
            tensors |= dict(_tensors(published, shapes[name], is_fp8))
        file = f"model-{number + 1:05}-of-{layers + 1:05}.safetensors"
        save_file(tensors, folder / file)
        weight_map |= dict.fromkeys(tensors, file)
    write_index(folder, weight_map)
    config.save_pretrained(folder)


def _tensors(name: str, shape: torch.Size, is_fp8: bool):
    if is_fp8 and len(shape) == 3 and ".experts." in name:
        stem, _, part = name.rpartition(".")
        for expert in range(shape[0]):
            halves = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
            for half in halves:
                yield from _tensors(f"{stem}.{expert}.{half}.weight", torch.Size((shape[1] // len(halves), shape[2])), True)
    elif is_fp8 and name.endswith(QUANTIZED):
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


def timed(work) -> dict[str, float]:
    """Seconds that `work` takes, and processor seconds, of its children too."""
    gc.collect()  # the model of the last load
    before, started = os.times(), time.perf_counter()
    work()
    after = os.times()
    return {"seconds": time.perf_counter() - started, "processor_seconds": sum(after[:4]) - sum(before[:4])}


def load(folder: Path, quantization: str, **options):
    from torchqwen_tpu import AutoModelForCausalLM, RuntimeConfig

    return AutoModelForCausalLM.from_pretrained(folder, runtime=RuntimeConfig(quantization=quantization), **options)


def measure(folder: Path, quantization: str, pairs: int) -> dict:
    from torchqwen_tpu.checkpoint.reader import READ_AHEAD

    files = sorted(folder.glob("*.safetensors"))
    size = sum(file.stat().st_size for file in files)
    cats, loads, beyond = [], [], []
    held = layer = 0
    for _ in range(pairs):
        drop_from_cache(files)
        cats.append(timed(lambda: subprocess.run(["cat", *map(str, files)], stdout=subprocess.DEVNULL, check=True)))
        drop_from_cache(files)
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        gc.collect()  # the model of the last load
        before, models = resident("VmRSS"), []
        loads.append(timed(lambda: models.append(load(folder, quantization))))  # noqa: B023, called at once
        sizes = {name: value.numel() * value.element_size() for name, value in models.pop().named_parameters()}
        held = sum(sizes.values())
        layer = sum(size for name, size in sizes.items() if name.startswith("model.layers.0."))
        beyond.append(resident("VmHWM") - before - held)
    ratios = [cat["seconds"] / load["seconds"] for cat, load in zip(cats, loads, strict=True)]
    return {
        "bytes": size,
        "cats": cats,
        "loads": loads,
        "load_to_cat": statistics.median(ratios),
        "load_to_cat_of_pairs": ratios,
        "device_bytes": held,
        "layer_bytes": layer,
        "read_ahead_bytes": READ_AHEAD,
        "host_bytes_beyond_devices": max(beyond),
    }


def measure_prepared(folder: Path, quantization: str) -> dict:
    """Loads of published and of prepared files, all in the page cache: what they cost beside the disk."""
    result = {}
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        target = Path(temporary) / "prepared"
        result["prepare"] = timed(lambda: load(folder, quantization, save_prepared=target))
        for name, source, options in (
            ("convert", folder, {}), ("prepared", folder, {"save_prepared": target}), ("prepared_alone", target, {})
        ):  # fmt: skip
            result[name] = timed(lambda: load(source, quantization, **options))  # noqa: B023, called at once
        result["prepared_bytes"] = sum(file.stat().st_size for file in target.iterdir())
    return result


def rounded(value):
    if isinstance(value, dict):
        return {name: rounded(own) for name, own in value.items()}
    if isinstance(value, list):
        return [rounded(own) for own in value]
    return round(value, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--format", choices=("fp8", "bf16"), default="fp8")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--quantization", default="keep")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--prepare", action="store_true")
    options = parser.parse_args()
    if not (options.folder / "config.json").exists():
        write(options.folder, options.layers, options.format == "fp8")
    import torch_xla

    torch.zeros(1).to(torch_xla.device()).cpu()  # the client and its threads are not the load's
    result = measure(options.folder, options.quantization, options.pairs)
    if options.prepare:
        result |= measure_prepared(options.folder, options.quantization)
    print(json.dumps(rounded(result), indent=2))


if __name__ == "__main__":
    main()
