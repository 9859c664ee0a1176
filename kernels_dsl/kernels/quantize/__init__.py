"""Quantisation kernels: seven launch strategies, of which `ops.quantize` picks the fastest for a call.

Scales of 128 elements, of blocks of 128 x 128, or given: a CTA has all that it needs in one tile.
- `tile.quantize_tile`: one launch, one read of x.

Scales of rows of x:
- `rows.quantize_rows`: one launch, one read; a row stays in registers. Also one scale of all of a small x.

Scales of rows of x and of its transpose:
- `lines.quantize_lines`: three launches, two reads, for tensors much larger than L2: rows, then tiles.
- `grid.quantize_grid`: for all others.

Scales of matrices or of all of x, and of rows of the transpose alone: maxima first, then conversion. -
`matrices.quantize_matrices`: one launch, one read; elements wait in shared memory for their matrix's maximum.
  Of x alone, for 16-bit matrices that fit the GPU's shared memory together.
- `matrices.quantize_three`: the same for q, k and v of attention at once. - `grid.quantize_grid`: one launch,
two reads, the second from registers, shared memory or L2. For small tensors. - `maxima.quantize_by_maxima`:
two launches, or three; two reads. For large tensors, in which CTAs that end early
  are replaced by others.
"""
