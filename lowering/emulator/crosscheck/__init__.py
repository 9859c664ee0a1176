"""Single instructions, emulator against GPU: `python -m lowering.emulator.crosscheck --help`.

Kernels that hold one instruction each get seeded random inputs; their results in the emulator are compared
with those of a GPU, run now or recorded earlier. Integer-exact cases must agree bit for bit; matrix products
of random values within the accumulation's last bits; approximate functions within the error that the PTX ISA
documents.

`ops` the scalar instructions, `cases` all launches, `kernels` and `async_kernels` the device side, `runner`
running and `record` recording, `compare` the rules, `calibrate` the tensor cores' model of accumulation.
"""
