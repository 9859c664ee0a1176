"""Small classes in place of vLLM's base modules: what a backend needs of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, TypeVar

import torch

M = TypeVar("M")


class AttentionBackend(ABC):
    @staticmethod
    @abstractmethod
    def get_name(): ...

    @staticmethod
    @abstractmethod
    def get_impl_cls(): ...

    @staticmethod
    @abstractmethod
    def get_builder_cls(): ...


class AttentionImpl(ABC, Generic[M]):
    @abstractmethod
    def __init__(self, *arguments, **options): ...

    @abstractmethod
    def forward(self, *arguments, **options): ...


class AttentionMetadataBuilder(ABC, Generic[M]):
    @abstractmethod
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.kv_cache_spec, self.layer_names = kv_cache_spec, layer_names

    @abstractmethod
    def build(self, common_prefix_len, common_attn_metadata, fast_build=False): ...


class AttentionType(str, Enum):
    DECODER = "decoder"
    ENCODER_ONLY = "encoder_only"


@dataclass(frozen=True)
class MultipleOf:
    base: int


@dataclass
class Common:
    """Fields of vLLM's CommonAttentionMetadata, as its model runner fills them."""

    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: Any = True


def modules(registered: dict[str, str], batch_invariant: bool = False) -> dict[str, ModuleType]:
    """Modules by their names in vLLM. What is registered goes to `registered`."""
    made = {
        name: ModuleType(name)
        for name in (
            "vllm", "vllm.envs", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backend",
            "vllm.v1.attention.backends", "vllm.v1.attention.backends.registry",
        )
    }  # fmt: skip
    base = made["vllm.v1.attention.backend"]
    for item in (AttentionBackend, AttentionImpl, AttentionMetadataBuilder, AttentionType, MultipleOf):
        setattr(base, item.__name__, item)
    base.AttentionCGSupport = SimpleNamespace(UNIFORM_BATCH="uniform batch")  # type: ignore[attr-defined]
    made["vllm.envs"].VLLM_BATCH_INVARIANT = batch_invariant  # type: ignore[attr-defined]
    made["vllm"].envs = made["vllm.envs"]  # type: ignore[attr-defined]
    registry = made["vllm.v1.attention.backends.registry"]
    registry.register_backend = registered.__setitem__  # type: ignore[attr-defined]
    registry.AttentionBackendEnum = SimpleNamespace(__members__=registered)  # type: ignore[attr-defined]
    return made
