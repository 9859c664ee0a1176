"""`BsrLinear` under the path that older pickles name."""

from __future__ import annotations

from kernels_dsl.nn.bsr_linear import BsrLinear as BsrLinear
