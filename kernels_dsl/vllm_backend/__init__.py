"""An attention backend for vLLM 0.33, as a plugin: `attention_decode`, `attention_varlen` and `append_kv` in
its server.

vLLM calls `register` where this package is installed (the entry point `vllm.general_plugins`); it makes a
backend known and chooses nothing. A server asks for it:

    vllm serve MODEL --attention-backend KERNELS_DSL
"""

from __future__ import annotations

import logging

NAME = "KERNELS_DSL"
"""The backend's name in vLLM."""
BACKEND = "kernels_dsl.vllm_backend.backend.KernelsDslBackend"


def register() -> None:
    """Make the backend known to vLLM; nothing where there is none. A vLLM without its registry is a
    warning."""
    try:
        import vllm
    except ImportError:
        return
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    except ImportError:
        logging.getLogger(__name__).warning(
            "vllm is %s, must have a registry of attention backends as 0.33: %s is not registered",
            getattr(vllm, "__version__", "unknown"), NAME,
        )  # fmt: skip
        return
    if NAME not in AttentionBackendEnum.__members__:  # vLLM may call this twice
        register_backend(NAME, BACKEND)
