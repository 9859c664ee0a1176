"""Sharding strategies for all operators of `torch.ops.kernels_dsl`, so that calls take DTensors.

Imported where a call has a DTensor. An operator without a rule says so before any communication.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.distributed.tensor._op_schema import OpSchema, OpStrategy, RuntimeSchemaInfo
from torch.distributed.tensor._ops.utils import register_op_strategy

from kernels_dsl.distributed import attention_rules, product_rules, quantize_rules
from kernels_dsl.distributed.rules import Call, Rule, call_of, strategies
from kernels_dsl.ops.attention import register as _attention  # noqa: F401
from kernels_dsl.ops.bsr import register as _bsr  # noqa: F401
from kernels_dsl.ops.gemm import register as _gemm  # noqa: F401
from kernels_dsl.ops.quantize import register as _quantize  # noqa: F401
from kernels_dsl.ops.serving import register as _serving  # noqa: F401

RULES: dict[str, Callable[[Call], Rule]] = {
    "gemm": product_rules.gemm,
    "gemm_gated": product_rules.gemm_gated,
    "scaled_gemm": product_rules.scaled_gemm,
    "grouped_gemm": product_rules.grouped_gemm,
    "bsr_gemm": product_rules.bsr_gemm,
    "bsr_scaled_gemm": product_rules.bsr_gemm,
    "bsr_sddmm": product_rules.bsr_sddmm,
    "attention": attention_rules.attention,
    "attention_fp8": attention_rules.attention,
    "attention_backward": attention_rules.attention_backward,
    "quantize": quantize_rules.quantize,
}
"""Operator -> the rule of its calls."""
_WRITES = "it writes tensors of the caller's, which cannot be placed anew"
_SERVING = "operations of serving work on the caches of one device"
WITHOUT_RULES = {
    **dict.fromkeys(
        ("gemm_out", "gemm_gated_out", "gemm_reduce_out", "scaled_gemm_out", "grouped_gemm_out",
         "bsr_gemm_out", "bsr_scaled_gemm_out", "quantize_out"), _WRITES,
    ),
    "gemm_reduce": "its reductions would need one over ranks, which addition and maxima do differently",
    **dict.fromkeys(("attention_decode", "merge_states", "append_kv"), _SERVING),
}  # fmt: skip
"""Operator -> why it takes no DTensors."""


def _by_rule(rule: Callable[[Call], Rule]) -> Callable[[OpSchema], OpStrategy]:
    def strategy(schema: OpSchema) -> OpStrategy:
        call = call_of(schema)
        return strategies(schema, call, rule(call))

    return strategy


def _refusal(name: str, reason: str) -> Callable[[OpSchema], OpStrategy]:
    def strategy(schema: OpSchema) -> OpStrategy:
        raise ValueError(
            f"kernels_dsl::{name} has no sharding rule, must be called with torch.Tensors, as DTensor's "
            f"to_local(): {reason}"
        )

    return strategy


def _register(name: str, strategy: Callable[[OpSchema], OpStrategy]) -> None:
    operator = getattr(torch.ops.kernels_dsl, name).default
    keywords = [x.name for x in operator._schema.arguments if x.kwarg_only]
    info = RuntimeSchemaInfo(static_argnum=0, static_kwargkey=keywords, needs_pytree=True)
    register_op_strategy(operator, schema_info=info)(strategy)


for _name, _rule in RULES.items():
    _register(_name, _by_rule(_rule))
for _name, _reason in WITHOUT_RULES.items():
    _register(_name, _refusal(_name, _reason))
