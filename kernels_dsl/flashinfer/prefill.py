"""FlashInfer's wrapper for prompts, and chunks of them, with a cache of pages."""

from __future__ import annotations

from typing import Any

import torch

from kernels_dsl.checks.eager_path import check_tensor
from kernels_dsl.checks.options import boolean
from kernels_dsl.flashinfer.plan import (
    Caches,
    DataType,
    LseForm,
    PageLists,
    Planned,
    Sizes,
    Wrapper,
    refuse,
    rules_of,
)


class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
    """Attention of packed queries, prompts or parts of them, to a cache of pages.

    Arguments as those of `BatchDecodeWithPagedKVCacheWrapper`; custom_mask_buf, mask_indptr_buf, jit_args and
    jit_kwargs must be None, variant_owns_mask False.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: Any = None,
        jit_kwargs: Any = None,
        variant_owns_mask: bool = False,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend, jit_args)
        refuse(
            custom_mask_buf=custom_mask_buf, mask_indptr_buf=mask_indptr_buf, jit_kwargs=jit_kwargs,
            variant_owns_mask=variant_owns_mask or None,
        )  # fmt: skip
        if use_cuda_graph:
            self._reserve(
                qo_indptr_buf=qo_indptr_buf, paged_kv_indptr_buf=paged_kv_indptr_buf,
                paged_kv_indices_buf=paged_kv_indices_buf,
                paged_kv_last_page_len_buf=paged_kv_last_page_len_buf,
            )  # fmt: skip

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: DataType = "float16",
        kv_data_type: DataType | None = None,
        o_data_type: DataType | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        block_tables: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        uniform_q_len: int | None = None,
    ) -> None:
        """Tables of the pages, for the calls of `run` that follow. Waits for the GPU, as FlashInfer's does.

        qo_indptr: int32 (B + 1,), where each sequence's queries start. causal: the last query lies on the
        last key. fixed_split_size, or disable_split_kv: the same bits of a sequence whatever the batch, from
        `attention_decode` for all; without them a batch with long prompts runs `attention_varlen`. The other
        arguments as those of `BatchDecodeWithPagedKVCacheWrapper.plan`; without effect are also seq_lens_q,
        max_token_per_sequence, max_sequence_kv and uniform_q_len. Masks and scores of several items must be
        None, use_fp16_qk_reduction False, and head_dim_vo head_dim_qk.
        """
        del non_blocking, seq_lens, seq_lens_q, block_tables, max_token_per_sequence, max_sequence_kv
        del uniform_q_len
        refuse(
            custom_mask=custom_mask, packed_custom_mask=packed_custom_mask, prefix_len_ptr=prefix_len_ptr,
            token_pos_in_items_ptr=token_pos_in_items_ptr, max_item_len_ptr=max_item_len_ptr,
            use_fp16_qk_reduction=use_fp16_qk_reduction or None,
            token_pos_in_items_len=token_pos_in_items_len or None,
            rope_scale=rope_scale, rope_theta=rope_theta,
        )  # fmt: skip
        if head_dim_vo not in (None, head_dim_qk):
            raise ValueError(f"head_dim_vo is {head_dim_vo}, must be {head_dim_qk}, as head_dim_qk")
        lists = PageLists(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        lists.check("paged_kv_")
        sizes = Sizes(num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        sizes.check()
        batch = paged_kv_last_page_len.shape[0]
        check_tensor("qo_indptr", qo_indptr)
        if qo_indptr.dtype != torch.int32 or tuple(qo_indptr.shape) != (batch + 1,):
            raise ValueError(
                f"qo_indptr is {qo_indptr.dtype} {tuple(qo_indptr.shape)}, must be torch.int32 ({batch + 1},)"
            )
        rules = rules_of(
            sizes, pos_encoding_mode, (window_left, 0 if boolean("causal", causal) else -1), logits_soft_cap,
            sm_scale, (q_data_type, kv_data_type, o_data_type),
        )  # fmt: skip
        rows = longest = None  # a captured call must have room for any
        if not self._use_cuda_graph:
            counts = qo_indptr.diff()
            rows, longest = (int(counts.sum()), int(counts.max())) if batch else (0, 0)
        invariant = fixed_split_size is not None or boolean("disable_split_kv", disable_split_kv)
        starts = qo_indptr.to(self.device, copy=True)
        table, used = self._table(lists, page_size), lists.used(page_size, self.device)
        self._set(Planned(table, used, starts, rows, longest, sizes, invariant=invariant, **rules))

    begin_forward = plan

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: Caches,
        *,
        q_scale: float | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        kv_cache_sf: Any = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> Any:
        """Attention of q (qo_indptr[B], H, D) as planned; arguments and result as of
        `BatchDecodeWithPagedKVCacheWrapper.run`.

        lse_base: "log2" or "ln"; lse_layout: "NH", the log-sum-exp (T, H), or "HN", (H, T). use_fp16_softmax
        and uses_spcompress must be None.
        """
        del enable_pdl
        refuse(
            skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor, kv_cache_sf=kv_cache_sf,
            use_fp16_softmax=use_fp16_softmax, uses_spcompress=uses_spcompress,
        )  # fmt: skip
        self._same(window_left=window_left)
        scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
        return self._call(
            q, paged_kv_cache, scales=scales, out=out, lse=lse, return_lse=return_lse, sinks=sinks,
            form=LseForm(lse_base, lse_layout),
        )  # fmt: skip
