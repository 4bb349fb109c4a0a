"""A conversation of two turns, streamed. The tiny model completes documentation; it is no assistant.

Expected output:

> What is asyncio?
third-party library into a single shared library.

The :func:`open` function can be used to
> What is a coroutine?
third-party library with Python code.

The :func:`open` function can be used to open a
"""

from pathlib import Path

from transformers import AutoTokenizer, TextStreamer

from torchqwen_tpu import AutoModelForCausalLM

MODEL = Path(__file__).parent / "tiny-qwen3.5-moe"

tokenizer = AutoTokenizer.from_pretrained(MODEL)
model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32")
streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)

messages = []
for question in ("What is asyncio?", "What is a coroutine?"):
    print(f"> {question}")
    messages.append({"role": "user", "content": question})
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    output = model.generate(**prompt, max_new_tokens=24, do_sample=False, streamer=streamer)
    answer = tokenizer.decode(output[0, prompt.input_ids.shape[1] :], skip_special_tokens=True)
    messages.append({"role": "assistant", "content": answer})
