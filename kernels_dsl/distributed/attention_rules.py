"""Sharding rules of attention and of its gradients: letters b of the batch, h of the heads."""

from __future__ import annotations

from kernels_dsl.distributed.rules import Call, Modes, Rule, broadcast

_ROWS = "queries attend to the keys of other ranks: use kernels_dsl.distributed.context_parallel_attention"
_DIM = "scores are sums over it"
_FUNCTIONS = "score_mod and mask_mod are given the place in the whole tensor"
_PACKED = "packed sequences have no mode for the batch"
_LISTS = ("counts", "indices", "full_counts", "full_indices")
_SEQLENS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k")


def _layout(call: Call) -> str:
    """The modes of q, in their order."""
    packed = len(call.shape("q")) == 3
    return {"bshd": "bshd", "bhsd": "bhsd", "thd": "shd"}["thd" if packed else call.options["layout"]]


def _paged(call: Call) -> bool:
    """Keys lie in pages, which have a mode more than packed queries."""
    return len(call.shape("k")) > len(call.shape("q"))


def _modes(layout: str, rows: str, dim: str) -> Modes:
    return tuple({"s": rows, "d": dim}.get(mode, mode) for mode in layout)


def _operands(call: Call) -> dict[str, Modes]:
    """The modes of all tensors of the forward pass, by their names."""
    layout = _layout(call)
    packed = "b" not in layout
    of_keys = "pthd" if _paged(call) else _modes(layout, "t", "d")
    found: dict[str, Modes] = {
        "q": _modes(layout, "s", "d"), "k": tuple(of_keys), "v": tuple(of_keys), "sinks": ("h",),
    }  # fmt: skip
    for name in call.operands:
        shape = call.shape(name)
        if name == "mask":
            found[name] = broadcast(shape, ("b", "h", "s", "t"))
        elif name in _LISTS:
            found[name] = broadcast(shape, ("b", "h", "s", "t")[: len(shape)])
        elif name in _SEQLENS:
            found[name] = ("p",) if packed or name != "seqused_k" else ("b",)
        elif name == "block_table":
            found[name] = ("p", None)
        elif name.startswith("aux"):
            found[name] = ("f",) * len(shape)
        elif name.endswith("_descale"):
            found[name] = broadcast(shape, ("b", "h"))
    return found


def _whole(call: Call) -> dict[str, str]:
    found = {"s": _ROWS, "t": _ROWS, "d": _DIM, "p": _PACKED, "f": _FUNCTIONS}
    options = call.options
    if options.get("score_mod") is not None or options.get("mask_mod") is not None:
        found.update(b=_FUNCTIONS, h=_FUNCTIONS)
    return found


def _units(call: Call) -> dict[str, int]:
    """Query heads that ranks cannot divide: those of one key head."""
    place = _layout(call).index("h")
    kv_heads = call.shape("k")[2 if _paged(call) else place]
    return {"b": 1, "h": max(call.shape("q")[place] // kv_heads, 1) if kv_heads else 1}


def _results(call: Call) -> tuple[Modes, Modes]:
    """The modes of the output and of the log-sum-exp."""
    layout = _layout(call)
    lse = ("h", "s") if "b" not in layout else ("b", "h", "s")
    return _modes(layout, "s", "d"), lse


def attention(call: Call) -> Rule:
    """The rule of `attention` and `attention_fp8`."""
    if "layout" not in call.options:
        call.options["layout"] = "bshd"
    out, lse = _results(call)
    results = (out, lse if call.options["return_lse"] else None)
    return Rule(_operands(call), results, _whole(call), _units(call))


def attention_backward(call: Call) -> Rule:
    """The rule of the gradients: those of the sinks and of the mask are summed over what these lack."""
    operands = _operands(call)
    out, lse = _results(call)
    operands.update(do=out, out=out, lse=lse, d_lse=lse)
    options = call.options
    results = (
        operands["q"] if options["needs_q"] else None,
        operands["k"] if options["needs_kv"] else None,
        operands["v"] if options["needs_kv"] else None,
        ("h",) if options["needs_sinks"] else None,
        operands["mask"] if options["needs_mask"] else None,
    )
    return Rule(operands, results, _whole(call), _units(call), summed=frozenset("bh"))
