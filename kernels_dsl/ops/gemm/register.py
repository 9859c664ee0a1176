"""Products of dense factors as operators of PyTorch: `gemm`, `gemm_gated` and `gemm_reduce`, with gradients;
`scaled_gemm`, `grouped_gemm`.

A call that writes `amax` or `preact_out` is one of the operator with an output.
"""

from __future__ import annotations

import torch

from kernels_dsl.ops.gemm import reduced_grad
from kernels_dsl.ops.gemm.gated_arguments import GATED_GEMM
from kernels_dsl.ops.gemm.grad import backward, setup_context
from kernels_dsl.ops.gemm.grouped_arguments import GROUPED_GEMM
from kernels_dsl.ops.gemm.product import GEMM
from kernels_dsl.ops.gemm.reduced_arguments import GEMM_REDUCE
from kernels_dsl.ops.gemm.reduced_operator import ReducedOperator
from kernels_dsl.ops.operators import LIBRARY, NO_GRADIENT, Operator
from kernels_dsl.ops.scaled.arguments import SCALED_GEMM

GEMM_OPERATOR = Operator(GEMM)
torch.library.register_autograd("kernels_dsl::gemm", backward, setup_context=setup_context, lib=LIBRARY)
GATED_GEMM_OPERATOR = Operator(GATED_GEMM)
torch.library.register_autograd("kernels_dsl::gemm_gated", backward, setup_context=setup_context, lib=LIBRARY)
GEMM_REDUCE_OPERATOR = ReducedOperator(GEMM_REDUCE)
torch.library.register_autograd(
    "kernels_dsl::gemm_reduce", reduced_grad.backward, setup_context=reduced_grad.setup_context, lib=LIBRARY
)
SCALED_GEMM_OPERATOR = Operator(SCALED_GEMM, NO_GRADIENT)
GROUPED_GEMM_OPERATOR = Operator(GROUPED_GEMM, NO_GRADIENT)
"""Also of `scaled_grouped_gemm`."""
