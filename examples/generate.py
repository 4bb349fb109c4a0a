"""Continue a prompt with the most likely tokens.

Expected output:

The :mod:`json` module provides a :class:`dict` object which provides a
separator of the object to be parsed and used with the :class:`dict`
class.  The :class:`JSON
"""

from pathlib import Path

from transformers import AutoTokenizer

from torchqwen_tpu import AutoModelForCausalLM

MODEL = Path(__file__).parent / "tiny-qwen3.5-moe"

tokenizer = AutoTokenizer.from_pretrained(MODEL)
model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32")

prompt = tokenizer("The :mod:`json` module", return_tensors="pt")
output = model.generate(**prompt, max_new_tokens=40, do_sample=False)
print(tokenizer.decode(output[0]))
