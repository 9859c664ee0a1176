"""Score and mask functions of a user, which kernels trace and the reference calls on index tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SLOPE = 0.125


def alibi(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    """A bias that falls with the distance, faster in later heads."""
    return score - (i - j) * SLOPE * (h + 1)


def thirds(b: Any, h: Any, i: Any, j: Any) -> Any:
    """Every third key."""
    return (i - j) % 3 == 0


def near(b: Any, h: Any, i: Any, j: Any) -> Any:
    """A band, as wide to either side."""
    return (i - j < 30) & (j - i < 50)


def sloped(score: Any, b: Any, h: Any, i: Any, j: Any, slopes: Any) -> Any:
    """A factor for each head. slopes: float32 (H,)."""
    return score * slopes[h]


def of_one_document(b: Any, h: Any, i: Any, j: Any, documents: Any) -> Any:
    """The same document. documents: int32 (B, longest sequence)."""
    return documents[b, i] == documents[b, j]


def every(b: Any, h: Any, i: Any, j: Any, step: Any) -> Any:
    """Every `step`-th key, and always the first."""
    return ((i - j) % step == 0) | (j == 0)


def sloped_within(score: Any, b: Any, h: Any, i: Any, j: Any, slopes: Any, documents: Any) -> Any:
    """`sloped`, beside a mask function that reads documents."""
    return score * slopes[h]


def documents_within(b: Any, h: Any, i: Any, j: Any, slopes: Any, documents: Any) -> Any:
    """`of_one_document`, beside a score function that reads slopes."""
    return documents[b, i] == documents[b, j]


@dataclass(frozen=True)
class Functions:
    """The functions that a call passes as score_mod and mask_mod, and kinds of their extra arguments:
    "slopes", "documents", or "number"."""

    score: Callable[..., Any] | None = None
    mask: Callable[..., Any] | None = None
    aux: tuple[str, ...] = ()


FUNCTIONS = {
    "alibi": Functions(alibi),
    "thirds": Functions(None, thirds),
    "near": Functions(None, near),
    "alibi and near": Functions(alibi, near),
    "slopes": Functions(sloped, None, ("slopes",)),
    "documents": Functions(None, of_one_document, ("documents",)),
    "every": Functions(None, every, ("number",)),
    "slopes and documents": Functions(sloped_within, documents_within, ("slopes", "documents")),
}
