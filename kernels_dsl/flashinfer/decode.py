"""FlashInfer's wrappers for decoding with a cache of pages."""

from __future__ import annotations

from typing import Any

import torch

from kernels_dsl.checks.options import boolean, integer
from kernels_dsl.flashinfer.plan import Caches, DataType, PageLists, Planned, Sizes, Wrapper, refuse, rules_of


class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
    """Attention of one query a sequence, or of `q_len_per_req`, to a cache of pages.

    float_workspace_buffer: says the device, and is not used. kv_layout: "NHD" or "HND". use_cuda_graph: calls
    of `run` may be captured; the three buffers then give the most sequences and pages, `plan` must keep the
    number of sequences, and the buffers themselves are not used. use_tensor_cores and backend ("auto", "fa2",
    "fa3") choose nothing here. jit_args must be None.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: Any = None,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend, jit_args)
        self.use_tensor_cores = use_tensor_cores
        if use_cuda_graph:
            self._reserve(
                paged_kv_indptr_buffer=paged_kv_indptr_buffer,
                paged_kv_indices_buffer=paged_kv_indices_buffer,
                paged_kv_last_page_len_buffer=paged_kv_last_page_len_buffer,
            )

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: DataType | None = None,
        kv_data_type: DataType | None = None,
        o_data_type: DataType | None = None,
        data_type: DataType | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
        *,
        window_right: int = 0,
        is_causal: bool | None = None,
    ) -> None:
        """Tables of the pages, for the calls of `run` that follow. Waits for the GPU, as FlashInfer's does.

        indptr (B + 1,), indices and last_page_len (B,): int32, on the GPU or the host. head_dim: of Q, K and
        V. window_left, window_right: -1 is no limit. logits_soft_cap, sm_scale: as there. q_data_type: bf16
        or fp16, default data_type, else fp16; kv_data_type: the same, or float8_e4m3fn; o_data_type:
        q_data_type.

        No effect: non_blocking; fixed_split_size and disable_split_kv, since splits depend on a sequence's
        own lengths alone; seq_lens and block_tables, which say what the lists of pages do. pos_encoding_mode
        must be "NONE", rope_scale and rope_theta None, is_causal None or what q_len_per_req > 1 is.
        """
        del non_blocking, fixed_split_size, disable_split_kv, seq_lens, block_tables
        refuse(rope_scale=rope_scale, rope_theta=rope_theta)
        lists = PageLists(indptr, indices, last_page_len)
        lists.check()
        sizes = Sizes(num_qo_heads, num_kv_heads, head_dim, page_size)
        sizes.check()
        rules = rules_of(
            sizes, pos_encoding_mode, (window_left, window_right), logits_soft_cap, sm_scale,
            (q_data_type or data_type, kv_data_type or data_type, o_data_type),
        )  # fmt: skip
        q_len = integer("q_len_per_req", q_len_per_req, least=1)
        if is_causal is not None and boolean("is_causal", is_causal) != (q_len > 1):
            raise ValueError(f"is_causal is {is_causal}, must be None or {q_len > 1}, as of q_len_per_req")
        table, used = self._table(lists, page_size), lists.used(page_size, self.device)
        rows = last_page_len.shape[0] * q_len
        self._set(Planned(table, used, None, rows, q_len, sizes, invariant=True, **rules))

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
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: Any = None,
    ) -> Any:
        """Attention of q (B · q_len_per_req, H, D) as planned: the output of q's shape, with `return_lse` and
        the log-sum-exp (…, H) of base 2.

        paged_kv_cache: (pages, 2, keys of a page, KV heads, D), in the layout HND with heads before keys, or
        a tuple of two tensors without the 2. Pages past a sequence's keys may hold NaN. q_scale, k_scale,
        v_scale: what the stored numbers are multiplied by. Tensors, float32 () or (KV heads,), for fp8 caches
        alone. sinks: (H,). window_left and q_len_per_req must be as planned, where they are given. enable_pdl
        has no effect. skip_softmax_threshold_scale_factor and kv_cache_sf must be None.
        """
        del enable_pdl
        if q_scale is k_scale is v_scale is out is lse is window_left is sinks is q_len_per_req is None:
            if skip_softmax_threshold_scale_factor is kv_cache_sf is None and return_lse is False:
                output = self._repeated(q, paged_kv_cache)
                if output is not None:
                    return output
        refuse(
            skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor, kv_cache_sf=kv_cache_sf
        )
        self._same(window_left=window_left, q_len_per_req=q_len_per_req)
        scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
        return self._call(
            q, paged_kv_cache, scales=scales, out=out, lse=lse, return_lse=return_lse, sinks=sinks
        )


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """`BatchDecodeWithPagedKVCacheWrapper` with `use_cuda_graph`."""

    def __init__(
        self,
        workspace_buffer: torch.Tensor,
        indptr_buffer: torch.Tensor,
        indices_buffer: torch.Tensor,
        last_page_len_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
    ) -> None:
        super().__init__(
            workspace_buffer, kv_layout, True, use_tensor_cores,
            paged_kv_indptr_buffer=indptr_buffer, paged_kv_indices_buffer=indices_buffer,
            paged_kv_last_page_len_buffer=last_page_len_buffer,
        )  # fmt: skip
