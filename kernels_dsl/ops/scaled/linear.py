"""`ScaledLinear` under the path that older pickles name."""

from __future__ import annotations

from kernels_dsl.nn.scaled_linear import ScaledLinear as ScaledLinear
