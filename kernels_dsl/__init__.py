"""GPU kernels written in Python with CUTLASS's CuTe DSL, for PyTorch tensors.

`gemm(a, b)` and its relatives compile their kernel at the first call, keep it on disk and launch it on
torch's current stream. Importing this package imports neither torch nor the compiler: names are looked up
when they are used.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # editors and type checkers see what `__getattr__` finds
    from kernels_dsl._version import __version__ as __version__
    from kernels_dsl.advice.advise import advise as advise
    from kernels_dsl.autotune import autotune_gemm as autotune_gemm
    from kernels_dsl.blocks.epilogue.functions import LinearEpilogue as LinearEpilogue
    from kernels_dsl.config.attention import Sm90AttentionConfig as Sm90AttentionConfig
    from kernels_dsl.config.attention_sm80 import Sm80AttentionConfig as Sm80AttentionConfig
    from kernels_dsl.config.gemm import GemmConfig as GemmConfig
    from kernels_dsl.config.gemm import Schedule as Schedule
    from kernels_dsl.config.gemm import Sm80GemmConfig as Sm80GemmConfig
    from kernels_dsl.config.gemm import Sm90GemmConfig as Sm90GemmConfig
    from kernels_dsl.integrations.torch_attention import register_torch_attention as register_torch_attention
    from kernels_dsl.integrations.transformers_attention import (
        register_transformers_attention as register_transformers_attention,
    )
    from kernels_dsl.integrations.transformers_paged import (
        register_transformers_paged_attention as register_transformers_paged_attention,
    )
    from kernels_dsl.nn.bsr_linear import BsrLinear as BsrLinear
    from kernels_dsl.nn.scaled_linear import ScaledLinear as ScaledLinear
    from kernels_dsl.nn.scaled_linear import scaled_linear as scaled_linear
    from kernels_dsl.ops.attention.attention import attention as attention
    from kernels_dsl.ops.attention.attention import attention_supports as attention_supports
    from kernels_dsl.ops.attention.attention import attention_varlen as attention_varlen
    from kernels_dsl.ops.attention.attention import (
        scaled_dot_product_attention as scaled_dot_product_attention,
    )
    from kernels_dsl.ops.attention.attention_fp8 import attention_fp8 as attention_fp8
    from kernels_dsl.ops.attention.attention_fp8 import attention_fp8_supports as attention_fp8_supports
    from kernels_dsl.ops.attention.attention_fp8 import attention_fp8_varlen as attention_fp8_varlen
    from kernels_dsl.ops.attention.fp8_inputs import quantize_qkv as quantize_qkv
    from kernels_dsl.ops.attention.functions import kernel_function as kernel_function
    from kernels_dsl.ops.bsr.bsr import bsr_gemm as bsr_gemm
    from kernels_dsl.ops.bsr.bsr import bsr_supports as bsr_supports
    from kernels_dsl.ops.bsr.sampled import bsr_sddmm as bsr_sddmm
    from kernels_dsl.ops.bsr.scaled import bsr_scaled_gemm as bsr_scaled_gemm
    from kernels_dsl.ops.bsr.scaled import bsr_scaled_supports as bsr_scaled_supports
    from kernels_dsl.ops.checked import checked as checked
    from kernels_dsl.ops.epilogues import register_epilogue as register_epilogue
    from kernels_dsl.ops.gemm.gated import gemm_gated as gemm_gated
    from kernels_dsl.ops.gemm.gated import gemm_gated_supports as gemm_gated_supports
    from kernels_dsl.ops.gemm.gemm import gemm as gemm
    from kernels_dsl.ops.gemm.gemm import supports as supports
    from kernels_dsl.ops.gemm.grouped import grouped_gemm as grouped_gemm
    from kernels_dsl.ops.gemm.grouped import grouped_gemm_supports as grouped_gemm_supports
    from kernels_dsl.ops.gemm.grouped import scaled_grouped_gemm as scaled_grouped_gemm
    from kernels_dsl.ops.gemm.grouped import scaled_grouped_gemm_supports as scaled_grouped_gemm_supports
    from kernels_dsl.ops.gemm.reduced import gemm_reduce as gemm_reduce
    from kernels_dsl.ops.gemm.reduced import gemm_reduce_supports as gemm_reduce_supports
    from kernels_dsl.ops.quantize.quantize import quantize as quantize
    from kernels_dsl.ops.quantize.quantize import quantize_supports as quantize_supports
    from kernels_dsl.ops.scaled.scaled_gemm import scaled_gemm as scaled_gemm
    from kernels_dsl.ops.scaled.scaled_gemm import scaled_gemm_supports as scaled_gemm_supports
    from kernels_dsl.ops.serving.append_kv import append_kv as append_kv
    from kernels_dsl.ops.serving.decode import attention_decode as attention_decode
    from kernels_dsl.ops.serving.decode import attention_decode_supports as attention_decode_supports
    from kernels_dsl.ops.serving.merge_states import merge_states as merge_states
    from kernels_dsl.ops.sm_margin import sm_margin as sm_margin
    from kernels_dsl.sparse.block_lists import BlockLists as BlockLists
    from kernels_dsl.sparse.tensor import BsrTensor as BsrTensor

# Public name -> the module that defines it.
_PUBLIC = {
    "__version__": "kernels_dsl._version",
    "gemm": "kernels_dsl.ops.gemm.gemm",
    "supports": "kernels_dsl.ops.gemm.gemm",
    "autotune_gemm": "kernels_dsl.autotune",
    "advise": "kernels_dsl.advice.advise",
    "gemm_gated": "kernels_dsl.ops.gemm.gated",
    "gemm_gated_supports": "kernels_dsl.ops.gemm.gated",
    "gemm_reduce": "kernels_dsl.ops.gemm.reduced",
    "gemm_reduce_supports": "kernels_dsl.ops.gemm.reduced",
    "attention": "kernels_dsl.ops.attention.attention",
    "attention_varlen": "kernels_dsl.ops.attention.attention",
    "attention_fp8": "kernels_dsl.ops.attention.attention_fp8",
    "attention_fp8_varlen": "kernels_dsl.ops.attention.attention_fp8",
    "quantize_qkv": "kernels_dsl.ops.attention.fp8_inputs",
    "attention_fp8_supports": "kernels_dsl.ops.attention.attention_fp8",
    "attention_supports": "kernels_dsl.ops.attention.attention",
    "scaled_dot_product_attention": "kernels_dsl.ops.attention.attention",
    "register_torch_attention": "kernels_dsl.integrations.torch_attention",
    "register_transformers_attention": "kernels_dsl.integrations.transformers_attention",
    "register_transformers_paged_attention": "kernels_dsl.integrations.transformers_paged",
    "kernel_function": "kernels_dsl.ops.attention.functions",
    "checked": "kernels_dsl.ops.checked",
    "sm_margin": "kernels_dsl.ops.sm_margin",
    "BlockLists": "kernels_dsl.sparse.block_lists",
    "quantize": "kernels_dsl.ops.quantize.quantize",
    "quantize_supports": "kernels_dsl.ops.quantize.quantize",
    "append_kv": "kernels_dsl.ops.serving.append_kv",
    "attention_decode": "kernels_dsl.ops.serving.decode",
    "attention_decode_supports": "kernels_dsl.ops.serving.decode",
    "merge_states": "kernels_dsl.ops.serving.merge_states",
    "scaled_gemm": "kernels_dsl.ops.scaled.scaled_gemm",
    "scaled_gemm_supports": "kernels_dsl.ops.scaled.scaled_gemm",
    "grouped_gemm": "kernels_dsl.ops.gemm.grouped",
    "grouped_gemm_supports": "kernels_dsl.ops.gemm.grouped",
    "scaled_grouped_gemm": "kernels_dsl.ops.gemm.grouped",
    "scaled_grouped_gemm_supports": "kernels_dsl.ops.gemm.grouped",
    "scaled_linear": "kernels_dsl.nn.scaled_linear",
    "ScaledLinear": "kernels_dsl.nn.scaled_linear",
    "bsr_gemm": "kernels_dsl.ops.bsr.bsr",
    "bsr_sddmm": "kernels_dsl.ops.bsr.sampled",
    "bsr_supports": "kernels_dsl.ops.bsr.bsr",
    "bsr_scaled_gemm": "kernels_dsl.ops.bsr.scaled",
    "bsr_scaled_supports": "kernels_dsl.ops.bsr.scaled",
    "BsrTensor": "kernels_dsl.sparse.tensor",
    "BsrLinear": "kernels_dsl.nn.bsr_linear",
    "register_epilogue": "kernels_dsl.ops.epilogues",
    "GemmConfig": "kernels_dsl.config.gemm",
    "Schedule": "kernels_dsl.config.gemm",
    "Sm80AttentionConfig": "kernels_dsl.config.attention_sm80",
    "Sm90AttentionConfig": "kernels_dsl.config.attention",
    "Sm80GemmConfig": "kernels_dsl.config.gemm",
    "Sm90GemmConfig": "kernels_dsl.config.gemm",
    "LinearEpilogue": "kernels_dsl.blocks.epilogue.functions",
}

__all__ = [*_PUBLIC]


def _refuse_shadow() -> None:
    """ImportError where `lowering` is another module, such as a file of the user's beside the script."""
    ours = os.path.join(os.path.dirname(os.path.dirname(__file__)), "lowering")
    found = importlib.util.find_spec("lowering")
    origin = found.origin if found is not None else None
    if origin == os.path.join(ours, "__init__.py"):
        return
    if origin is None or os.path.dirname(os.path.realpath(origin)) != os.path.realpath(ours):
        raise ImportError(
            f"kernels_dsl needs the package 'lowering' that is installed with it, in {ours}, but Python "
            f"finds {origin or 'none'} first on sys.path: rename that file, or take its folder off the path"
        )


_refuse_shadow()


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'kernels_dsl' has no attribute {name!r}")
    with _no_look_for_garbage():
        value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


@contextmanager
def _no_look_for_garbage() -> Iterator[None]:
    """Imports make objects that stay; looking among them for garbage takes a tenth of the time.

    The next allocation would catch up on it. So all young objects join the old ones, among which Python looks
    seldom: `gc.unfreeze` puts there what `gc.freeze` sets aside. Objects that the caller froze stay frozen.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
