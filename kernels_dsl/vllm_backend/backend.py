"""The classes that vLLM asks an attention backend for. Imports vLLM: `kernels_dsl.vllm_backend` does not."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from vllm import envs
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)

from kernels_dsl.config.attention import HEAD_DIM_STEP, MAX_HEAD_DIM
from kernels_dsl.ops.serving.append_kv import append_kv
from kernels_dsl.ops.serving.paged_attention import paged_attention
from kernels_dsl.ops.serving.scales import FP8
from kernels_dsl.vllm_backend import NAME

FP8_NAMES = ("fp8", "fp8_e4m3")
FP8_DIM_STEP = 16
"""Head dimensions of fp8 caches: rows are copied in pieces of 16 bytes."""


class KernelsDslBackend(AttentionBackend):
    """Answers to what vLLM may give to this backend, and its classes."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16", *FP8_NAMES]
    forward_includes_kv_cache_update: bool = False

    @staticmethod
    def get_name() -> str:
        """The name by which vLLM has it."""
        return NAME

    @staticmethod
    def get_impl_cls() -> type[KernelsDslImpl]:
        """The class of a layer's attention."""
        return KernelsDslImpl

    @staticmethod
    def get_builder_cls() -> type[KernelsDslMetadataBuilder]:
        """The class that makes a step's metadata."""
        return KernelsDslMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Pages of any number of keys run; those of a multiple of 16 run fast."""
        return [MultipleOf(16)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """True for multiples of 8 up to 256."""
        return 0 < head_size <= MAX_HEAD_DIM and head_size % HEAD_DIM_STEP == 0

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """True from 8.0 on."""
        return bool(capability.major >= 8)

    @classmethod
    def supports_sink(cls) -> bool:
        """True: sinks enter the softmax in the kernels."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """True: pages before the window are not read."""
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """True: with VLLM_BATCH_INVARIANT=1 all requests go to `attention_decode`, where a request's bits
        depend on itself alone."""
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """False: a request with more queries than the host knows of would get NaN for those beyond."""
        return False

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
    ) -> str | None:
        """Says why what is supported alone is not together; None if it is."""
        del block_size, use_mla, has_sink, use_sparse, use_mm_prefix
        if kv_cache_dtype in FP8_NAMES:
            if (device_capability.major, device_capability.minor) < (8, 9):
                return "fp8 caches need compute capability 8.9"
            if head_size % FP8_DIM_STEP:
                return f"head_size is {head_size}, must be a multiple of {FP8_DIM_STEP} with fp8 caches"
        elif kv_cache_dtype in ("float16", "bfloat16") and getattr(torch, kv_cache_dtype) != dtype:
            return f"kv_cache_dtype is {kv_cache_dtype}, must be that of the model, {dtype}, or fp8"
        return None


@dataclass
class KernelsDslMetadata:
    """A step's tokens, all tensors on the GPU. No request has more than max_query_len queries and max_seq_len
    keys.

    query_start_loc: int32 (requests + 1,), where each one's queries start. seq_lens: int32 (requests,), the
    keys of each, those of this step included. block_table: int32 (requests, n), their pages. slot_mapping:
    int64 (tokens,), where new keys go.
    """

    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor


class KernelsDslMetadataBuilder(AttentionMetadataBuilder[KernelsDslMetadata]):
    """Makes a step's metadata of what vLLM has for all backends. Nothing is planned, and nothing read back.

    A CUDA graph of a whole step fits batches whose requests have at most as many queries as when it was
    captured.
    """

    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.UNIFORM_BATCH
    supports_update_block_table: bool = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> KernelsDslMetadata:
        """The metadata of a step. ValueError for a batch that is not causal, or some of it."""
        del common_prefix_len, fast_build
        common = common_attn_metadata
        if common.causal is not True:
            raise ValueError("causal is not True, must be: this backend is for causal attention")
        requests = common.query_start_loc.shape[0] - 1
        return KernelsDslMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens[:requests],
            block_table=common.block_table_tensor[:requests],
            slot_mapping=common.slot_mapping,
        )

    def update_block_table(
        self, metadata: KernelsDslMetadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> KernelsDslMetadata:
        """The same step with the pages of another group of layers."""
        return replace(
            metadata, block_table=blk_table[: metadata.seq_lens.shape[0]], slot_mapping=slot_mapping
        )


class KernelsDslImpl(AttentionImpl[KernelsDslMetadata]):
    """A layer's attention. ValueError where the layer wants ALiBi, or is not a decoder's own attention."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        if alibi_slopes is not None:
            raise ValueError("alibi_slopes is given, must be None: this backend has no ALiBi")
        if attn_type != AttentionType.DECODER:
            raise ValueError(f"attn_type is {attn_type}, must be {AttentionType.DECODER}")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.batch_invariant = bool(envs.VLLM_BATCH_INVARIANT)
        self.options = {
            "causal": True, "window": None if sliding_window is None else (sliding_window - 1, None),
            "softcap": float(logits_soft_cap or 0.0), "scale": self.scale, "sinks": sinks,
        }  # fmt: skip

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: KernelsDslMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of query (tokens, H, D) to the pages, written to `output` (tokens, H, D) or (tokens, H ·
        D).

        kv_cache: (pages, KV heads, keys of a page, 2 · D), keys beside values, in any order in memory.
        attn_metadata: None in a run that only measures memory, whose output is 0. Rows past the step's tokens
        are not written. key and value were given to `do_kv_cache_update`. ValueError for quantised outputs.
        """
        del key, value
        if output_scale is not None or output_block_scale is not None:
            raise ValueError("output_scale is given, must be None: outputs are not quantised here")
        if attn_metadata is None:
            return output.fill_(0)
        tokens = attn_metadata.num_actual_tokens
        keys, values = self._caches(kv_cache)
        paged_attention(
            query[:tokens].view(tokens, self.num_heads, self.head_size), keys, values,
            cu_seqlens_q=attn_metadata.query_start_loc, max_seqlen_q=attn_metadata.max_query_len,
            seqused_k=attn_metadata.seq_lens, block_table=attn_metadata.block_table,
            max_seqlen_k=attn_metadata.max_seq_len, batch_invariant=self.batch_invariant,
            out=output[:tokens].view(tokens, self.num_heads, self.head_size),
            **self._scales(layer), **self.options,
        )  # fmt: skip
        return output

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Writes key and value (tokens, KV heads, D) of the first `slot_mapping` tokens into the pages."""
        tokens = slot_mapping.shape[0]
        keys, values = self._caches(kv_cache)
        append_kv(key[:tokens], value[:tokens], keys, values, slot_mapping, **self._scales(layer))

    def _caches(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V as (pages, keys of a page, KV heads, D)."""
        if self.kv_cache_dtype in FP8_NAMES and kv_cache.dtype != FP8:
            kv_cache = kv_cache.view(FP8)
        keys, values = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        return keys, values

    def _scales(self, layer: Any) -> dict[str, torch.Tensor]:
        """The scales of fp8 caches, float32 (): what is stored times them is the key or value."""
        if self.kv_cache_dtype not in FP8_NAMES:
            return {}
        return {"k_scale": layer._k_scale.view(()), "v_scale": layer._v_scale.view(())}
