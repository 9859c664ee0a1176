"""A fuzzer of every public operation: `python -m tests.fuzz FAMILY --cases N --seed S`.

`draw` makes random choices, `memory` lays tensors between poison and compares every byte afterwards, `ritual`
runs one case and checks it, `worker` and `pool` run many in processes that may crash or hang, `planted` has
faulty operations that the harness must catch. One module a family draws its cases: `gemm`, `attention`,
`fp8`, `bsr`.
"""
