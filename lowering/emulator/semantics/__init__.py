"""Results of single instructions, as pure functions of NumPy arrays.

Nothing here knows warps, memory or time: the executor reads the operands, calls these functions, and writes
the results where and when its model of the asynchronous units says. Bit patterns travel as unsigned integer
arrays (`uint8`, `uint16`, `uint32`); a lane is one position of the first axis. Sources: the PTX ISA for what
instructions mean, and the layouts that CuTe's own atoms report, which the tests compare against.

`swizzle`   shared-memory swizzles
`tma`       tensor map descriptors, boxes, out-of-bounds rules, reductions
`wgmma`     matrix descriptors, operand addresses, fragments, products
`mma`       fragments and products of `mma.sync`
`ldmatrix`  lane to row maps of `ldmatrix`, `stmatrix`, `movmatrix`
`numeric`   number formats, conversions, rounding
`arithmetic` float32 arithmetic with directed rounding
`tensor_core` operand formats and accumulation of the matrix instructions
"""
