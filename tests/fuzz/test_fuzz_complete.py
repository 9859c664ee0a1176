"""Every public operation, and every argument of one, is drawn by a family, or has a reason why not."""

from __future__ import annotations

import importlib
import inspect
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.fuzz.case import Settings
from tests.fuzz.families import FAMILIES, generate, module_of

CASES = range(0, 10_000, 3)
"""Of a long run: some of every 32 that share a kernel."""
LONG_RUN = Settings()
MODULES = ("kernels_dsl", "kernels_dsl.flash_attn", "kernels_dsl.flash_attn.cute")
_ARGUMENT = "a record or a number, which operations are given and whose values are drawn"
NOT_DRAWN = {
    "__version__": "a string",
    "advise": "measures operations that are drawn",
    "register_torch_attention": "drawn on a GPU where torch has a registry",
    "register_transformers_attention": "drawn where transformers is installed",
    "register_transformers_paged_attention": "calls append_kv, attention_decode and attention_varlen",
    "BsrTensor": "drawn by its makers",
    **dict.fromkeys(("GemmConfig", "Schedule", "LinearEpilogue"), _ARGUMENT),
    **dict.fromkeys(
        ("Sm80AttentionConfig", "Sm90AttentionConfig", "Sm80GemmConfig", "Sm90GemmConfig"), _ARGUMENT
    ),
}
NOT_VARIED = {
    "attention": {"score_mod_bwd": "the backward pass derives it; tests/ops/attention has users' own"},
    "attention_varlen": {"score_mod_bwd": "as of attention"},
    "attention_fp8_varlen": dict.fromkeys(
        ("causal", "window", "alignment", "softcap", "blocks"), "attention_options draws them"
    ),
    "scaled_dot_product_attention": {"deterministic": "is attention's, of which it is drawn"},
    "autotune_gemm": {"options": "are gemm's"},
    "checked": {"enabled": "is given by its place"},
}
"""Arguments that the cases of an operation do not name."""


@cache
def _drawn_by(family: str) -> frozenset[str]:
    """The features of a family's cases, as a run on a GPU draws them."""
    return frozenset(name for number in CASES for name in generate(family, number, LONG_RUN).features)


def _drawn() -> frozenset[str]:
    return frozenset().union(*map(_drawn_by, FAMILIES))


@cache
def _sources() -> tuple[str, ...]:
    folder = Path(__file__).parent
    return tuple(path.read_text() for path in folder.glob("*.py") if not path.name.startswith("test_"))


def _public() -> dict[str, Any]:
    """Public names by what a feature calls them: FlashAttention-4's have "cute." before them."""
    found = {}
    for module in map(importlib.import_module, MODULES):
        prefix = "cute." if module.__name__.endswith("cute") else ""
        own = getattr(module, "__all__", None) or [
            name for name, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__ and name[0] != "_"
        ]  # fmt: skip
        found.update({prefix + name: getattr(module, name) for name in own})
    return found


def _words(name: str, sources: tuple[str, ...]) -> bool:
    return any(re.search(rf"\b{re.escape(name)}\b", text) for text in sources)


def _is_covered(name: str) -> bool:
    """A feature of cases; of a function that says why not, a call of it."""
    return _words(name, _sources()) if name.endswith("supports") else name in _drawn()


@pytest.mark.parametrize("name", _public())
def test_every_public_operation_is_drawn(name):
    assert _is_covered(name) or name in NOT_DRAWN, (
        f"{name} is public, and no family of tests/fuzz draws it: add a case, and its name to the features"
    )


def test_the_exceptions_are_public_and_not_drawn():
    assert set(NOT_DRAWN) <= set(_public())
    late = {"register_torch_attention", "register_transformers_attention"}
    assert not [name for name in set(NOT_DRAWN) - late if name in _drawn()]


def test_an_operation_that_nobody_draws_is_found():
    assert not _is_covered("gemm_of_tomorrow") and not _is_covered("gemm_of_tomorrow_supports")


def test_operations_that_are_drawn_are_expected_of_a_long_run():
    expected = {name for family in FAMILIES for name in module_of(family).expected_features(LONG_RUN)}
    assert {name for name in _public() if name in _drawn()} <= expected


@pytest.mark.parametrize("name", [name for name, value in _public().items() if inspect.isfunction(value)])
def test_every_argument_of_an_operation_is_drawn(name):
    """Named in a module of cases that names the operation."""
    if name in NOT_DRAWN or name.endswith("supports") or "flash_attn" in name:
        pytest.skip("not drawn itself, or another package's arguments")
    own = tuple(text for text in _sources() if re.search(rf"\b{name}\b", text))
    missing = [
        argument for argument in inspect.signature(_public()[name]).parameters
        if not _words(argument, own) and argument not in NOT_VARIED.get(name, {})
    ]  # fmt: skip
    assert not missing, f"no case of {name} draws {', '.join(missing)}"
