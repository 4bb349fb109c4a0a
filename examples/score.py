"""Score a text token by token: log-probability in nats, rank, and the most likely token in its place.

Expected output:

' os'       -4.19    9  ' _'
'\\n'        -0.04    0  '\\n'
'import'    -2.40    3  '   '
' sys'      -1.79    2  ' _'
'\\n'        -1.05    1  '\\n\\n'
"""

from pathlib import Path

from transformers import AutoTokenizer

from torchqwen_tpu import AutoModelForCausalLM, score

MODEL = Path(__file__).parent / "tiny-qwen3.5-moe"

tokenizer = AutoTokenizer.from_pretrained(MODEL)
model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32")

(scored,) = score(model, ["import os\nimport sys\n"], tokenizer=tokenizer, top_k=1)
for token, logprob, rank, best in zip(scored.token_ids, scored.logprob, scored.rank, scored.top_ids[:, 0], strict=True):
    print(f"{tokenizer.decode(token)!r:10} {logprob:6.2f} {rank:4}  {tokenizer.decode(best)!r}")
