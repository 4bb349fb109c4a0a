"""One model on a mesh of eight devices, four chips of two cores; on a CPU torch_xla runs eight virtual ones.

The argument chooses the layout: `dp` (default), every core owns whole requests; `dp_tp`, every chip owns whole requests
and its two cores share the heads; `one`, a single device. Experts are spread over all devices. All print the same
tokens.

Expected output:

[319, 380, 302, 1417, 2083, 29, 413, 280, 380, 302, 2660, 2660, 1733, 1047, 7, 581]
[1867, 263, 310, 438, 307, 1178, 63, 472, 671, 1867, 263, 198, 267, 569, 655, 333]
[262, 492, 3733, 263, 687, 333, 1375, 536, 275, 488, 2372, 815, 338, 380, 275, 198]
"""

import sys
from pathlib import Path

from transformers import AutoTokenizer

from torchqwen_tpu import AutoModelForCausalLM, ParallelConfig

MODEL = Path(__file__).parent / "tiny-qwen3.5-moe"
PROMPTS = ["def main():\n", "The :mod:`json` module", "import os\n\n\ndef read_lines(path):\n"]
LAYOUTS = {
    "dp": ParallelConfig(chips=4, cores=2, layout="dp"),
    "dp_tp": ParallelConfig(chips=4, cores=2, layout="dp_tp"),
    "one": ParallelConfig(chips=1, cores=1),
}

tokenizer = AutoTokenizer.from_pretrained(MODEL, padding_side="left")
parallel = LAYOUTS[sys.argv[1] if sys.argv[1:] else "dp"]
model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32", parallel=parallel)

prompts = tokenizer(PROMPTS, padding=True, return_tensors="pt")
output = model.generate(**prompts, max_new_tokens=16, do_sample=False)
for tokens in output[:, prompts.input_ids.shape[1] :].tolist():
    print(tokens)
