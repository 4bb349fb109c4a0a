r"""A batch of prompts of different lengths, and a second turn that continues from the returned cache.

Prompts are padded on the left. The second turn passes the whole sequence, the mask of the whole sequence and the cache;
only what the cache has not seen is computed.

Expected output:

"def main():\n            return 'unknown>'\n        return '{}{}'.format(text"
'The :mod:`json` module provides a :class:`dict` object which provides a\nseparator of'
'import os\nimport sys\n\nclass Reader:\n    def __init__(self, progress, progress, pro'
'\n\nThe following example shows how the :class:`Formatter` class is a\n:ref'
'\n\nThe following example demonstrates the use of the :class:`JSONDecode'
'\n\nThe following example demonstrates the use of the reception of a progress'
"""

from pathlib import Path

import torch
from transformers import AutoTokenizer

from torchqwen_tpu import AutoModelForCausalLM

MODEL = Path(__file__).parent / "tiny-qwen3.5-moe"
PROMPTS = ["def main():\n", "The :mod:`json` module", "import os\nimport sys\n\nclass Reader:\n"]
SECOND = "\n\nThe following example"

tokenizer = AutoTokenizer.from_pretrained(MODEL, padding_side="left")
model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32")

prompts = tokenizer(PROMPTS, padding=True, return_tensors="pt")
options = {"max_new_tokens": 16, "do_sample": False, "return_dict_in_generate": True}
first = model.generate(**prompts, **options)
for text in tokenizer.batch_decode(first.sequences, skip_special_tokens=True):
    print(repr(text))

second = tokenizer([SECOND] * len(PROMPTS), return_tensors="pt").input_ids
sequences = torch.cat([first.sequences, second], dim=1)
new_columns = torch.ones(len(PROMPTS), sequences.shape[1] - prompts.attention_mask.shape[1], dtype=torch.long)
# No sequence stopped early here; of one that did, the columns after its stop token would be 0.
mask = torch.cat([prompts.attention_mask, new_columns], dim=1)
output = model.generate(sequences, attention_mask=mask, cache=first.cache, **options)
new = output.sequences[:, first.sequences.shape[1] :]
for text in tokenizer.batch_decode(new, skip_special_tokens=True):
    print(repr(text))
