"""`BsrTensor` under the path that older pickles name."""

from __future__ import annotations

from kernels_dsl.sparse.tensor import BsrTensor as BsrTensor
