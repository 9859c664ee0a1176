"""Run FlashAttention's tests/cute on this library: python -m tests.flash_attention_suite CHECKOUT [pytest's].

Needs flash-attn-4 and einops, whose tests import them, and a checkout of its repository. Without a GPU,
`--emulate ARCH` before the checkout runs tests in the emulator, of which `-k` had better choose tiny ones.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

NAMES = ("flash_attn_func", "flash_attn_varlen_func", "_flash_attn_fwd", "_flash_attn_bwd")


def put_in_place(emulated: bool) -> None:
    """Replace flash-attn-4's functions in the modules that its tests import them from."""
    import flash_attn.cute
    import flash_attn.cute.interface

    from tests.flash_attention_suite import functions

    for name in NAMES:
        for module in (flash_attn.cute, flash_attn.cute.interface):
            if hasattr(module, name):
                function = getattr(functions, name)
                setattr(module, name, _on_cpu(function) if emulated else function)


class _Move(torch.autograd.Function):
    """A tensor on another device, and its gradient where it came from."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, device: str) -> torch.Tensor:
        """`x` on the device."""
        context.device = x.device
        return x.to(device)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        """The gradient on the device of `x`."""
        return gradient.to(context.device), None


def _on_cpu(function: Callable) -> Callable:
    """A function of tensors on a pretended GPU by one of CPU tensors."""

    def call(*args: Any, **options: Any) -> Any:
        args, options = tree_map_only(torch.Tensor, lambda x: _Move.apply(x, "cpu"), (args, options))
        return tree_map_only(torch.Tensor, lambda x: _Move.apply(x, "cuda"), function(*args, **options))

    return call


def main() -> int:
    """Run pytest on the tests that are named, or on all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--emulate", metavar="ARCH", help="sm_90a, say")
    parser.add_argument("checkout", type=Path)
    asked, others = parser.parse_known_args()
    folder = asked.checkout / "tests" / "cute"
    if not folder.is_dir():
        parser.error(f"{folder} does not exist: name a checkout of FlashAttention's repository")
    sys.path.insert(0, str(folder))
    # Tests ask for the GPU when they are imported.
    from lowering import emulator
    from tests.lowering.emulator.no_triton import without_triton

    without_triton()
    around = emulator.run(asked.emulate, torch_cuda=True) if asked.emulate else nullcontext()
    with around:
        put_in_place(asked.emulate is not None)
        named = [x if x.startswith("-") or not x.startswith("test_") else str(folder / x) for x in others]
        chosen = named if any(x.startswith(str(folder)) for x in named) else [*named, str(folder)]
        return pytest.main(["-p", "no:cacheprovider", "--rootdir", str(folder), *chosen])


if __name__ == "__main__":
    raise SystemExit(main())
