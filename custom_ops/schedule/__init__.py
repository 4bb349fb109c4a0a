"""What the TPU compiler's schedule says of each Pallas kernel, without a TPU: `python -m custom_ops.schedule`.

`cases` holds what is compiled, `bundles` reads the compiler's dump, `measure` compiles in a process of its own, `model`
turns bundles and bytes into times, `report` prints.
"""
