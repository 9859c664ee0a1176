"""The parts of a call whose arguments come by name: for the functions that say why a call cannot run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernels_dsl.ops.attention.arguments import (
    AttentionOptions,
    Extras,
    MaxSeqlens,
    Seqlens,
    aux_of,
    widths_of,
)
from lowering.records import NamedTuple

PACKED = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "block_table", "max_seqlen_q")
"""Arguments that packed sequences have beside others."""


class Parts(NamedTuple):
    """The arguments of a call beside q, k and v; `others`: those that no record holds."""

    options: AttentionOptions
    extras: Extras
    others: dict[str, Any]


def parts_of(operation: str, arguments: Mapping[str, Any], names: tuple[str, ...]) -> Parts:
    """The parts of a call of `operation`, whose arguments `names` are beside `AttentionOptions`.

    TypeError for an argument that it does not have.
    """
    for name in arguments:
        if name not in names and name not in AttentionOptions._fields:
            raise TypeError(f"{name} is given, must not: {operation} has no such argument")
    picked = {name: arguments[name] for name in AttentionOptions._fields if name in arguments}
    if picked.get("window") is not None:
        picked["window"] = widths_of(picked["window"])
    seqlens = longest = None
    if "cu_seqlens_q" in names:
        seqlens = Seqlens(*[arguments.get(name) for name in PACKED[:4]])  # type: ignore[arg-type]
        longest = MaxSeqlens(arguments.get("max_seqlen_q", 0), arguments.get("max_seqlen_k"))
    mask, sinks, blocks = (arguments.get(name) for name in ("mask", "sinks", "blocks"))
    extras = Extras(mask, sinks, blocks, aux_of(arguments.get("aux", ())), seqlens, longest)
    beside = (*PACKED, "max_seqlen_k", *AttentionOptions._fields, *Extras._fields)
    others = {name: value for name, value in arguments.items() if name not in beside}
    return Parts(AttentionOptions(**picked), extras, others)
