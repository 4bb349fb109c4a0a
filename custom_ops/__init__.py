"""Operations of Qwen 3.5 written in JAX: one folder an operation, one file an implementation.

`reference` defines the right answer, `xla` runs on any backend. `pallas_tpu` is for TPUs. Nothing here knows PyTorch but
`bridge.py` and `tpu_compiler.py`, the doors to torch_xla.
"""
