"""Sharding rules of operators, by the modes that their tensors have in common.

A rule says which modes of an operator's tensors are the same one, as einsum's letters do. To shard a letter
is to shard every tensor that has it; what a result lacks of it is a partial sum. From that follow the
strategies that DTensor chooses from, on a mesh of any number of dimensions.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DeviceMesh, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy, TupleStrategy
from torch.distributed.tensor._ops.utils import generate_redistribute_costs

Modes = tuple[str | None, ...]
"""A letter for each mode of a tensor; None for a mode that is read whole, such as a broadcast one."""


class Rule(NamedTuple):
    """The ways to shard a call of an operator.

    `operands`: the modes of each tensor, by its name. `results`: those of each result, None for one without
    elements. `whole`: letter -> why it cannot be sharded. `units`: letter -> elements that ranks cannot
    divide; letters that are not in it may be shared unevenly. `summed`: letters whose shares add up to the
    result. `added`: operands that are added to it, `linear`: those that it is proportional to, each alone.
    """

    operands: Mapping[str, Modes]
    results: tuple[Modes | None, ...]
    whole: Mapping[str, str]
    units: Mapping[str, int] = {}
    summed: frozenset[str] = frozenset()
    added: frozenset[str] = frozenset()
    linear: tuple[str, ...] = ()


class Operand(NamedTuple):
    """A tensor of a call that is sharded."""

    name: str
    strategy: OpStrategy

    @property
    def spec(self) -> DTensorSpec:
        """Its placements."""
        found: DTensorSpec = self.strategy.strategies[0].output_spec
        return found

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape, of all ranks together."""
        return tuple(self.strategy.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""
        found: torch.dtype = self.strategy.tensor_meta.dtype
        return found


class Call(NamedTuple):
    """A call of an operator on sharded tensors: these by name, lists as name[i], and the other arguments."""

    operands: dict[str, Operand]
    options: dict[str, Any]

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return self.operands[name].shape


def call_of(schema: OpSchema) -> Call:
    """The arguments of a call by their names."""
    operands: dict[str, Operand] = {}
    defaults = {x.name: x.default_value for x in schema.op._schema.arguments if x.has_default_value()}
    options: dict[str, Any] = {**defaults, **schema.kwargs_schema}
    for argument, value in zip(schema.op._schema.arguments, schema.args_schema):
        name = argument.name
        children = value.children if isinstance(value, TupleStrategy) else ()
        for label, x in ((name, value), *((f"{name}[{i}]", x) for i, x in enumerate(children))):
            if isinstance(x, OpStrategy):
                operands[label] = Operand(label, x)
    return Call(operands, options)


class _Share(NamedTuple):
    """A way to share the work over one dimension of the mesh: a placement for each operand and result."""

    operands: tuple[Placement, ...]
    results: tuple[Placement, ...]
    letter: str | None = None


def _placed(modes: Modes | None, letter: str, otherwise: Placement) -> Placement:
    if modes is None:
        return Replicate()
    return Shard(modes.index(letter)) if letter in modes else otherwise


def _shares(rule: Rule, names: Sequence[str]) -> Iterator[_Share]:
    """All ways to share the work over one dimension of the mesh."""
    whole, partial = Replicate(), Partial()
    yield _Share((whole,) * len(names), (whole,) * len(rule.results))
    letters = {letter for name in names for letter in rule.operands[name] if letter is not None}
    for letter in sorted(letters - set(rule.whole)):
        summed: Placement = partial if letter in rule.summed else whole
        yield _Share(
            tuple(
                _placed(rule.operands[name], letter, summed if name in rule.added else whole)
                for name in names
            ),
            tuple(_placed(modes, letter, summed) for modes in rule.results),
            letter,
        )
    for factor in rule.linear:
        operands = tuple(partial if x == factor or x in rule.added else whole for x in names)
        yield _Share(operands, tuple(whole if modes is None else partial for modes in rule.results))


def _divides(letter: str, size: int, call: Call, rule: Rule) -> bool:
    """True if so many ranks can share the letter."""
    unit = rule.units.get(letter)
    if unit is None:
        return True
    extents = {x.shape[rule.operands[x.name].index(letter)] for x in _having(letter, call, rule)}
    return max(extents) % (size * unit) == 0


def _having(letter: str, call: Call, rule: Rule) -> list[Operand]:
    return [x for x in call.operands.values() if letter in rule.operands[x.name]]


def check(call: Call, rule: Rule) -> None:
    """ValueError for a placement with which the operator gives no result: before any communication."""
    for x in call.operands.values():
        counts: dict[int, int] = {}
        for size, placement in zip(x.spec.mesh.shape, x.spec.placements):
            if isinstance(placement, Shard):
                counts[placement.dim] = counts.get(placement.dim, 1) * size
            elif isinstance(placement, Partial) and not _adds(x.dtype):
                raise ValueError(f"{x.name} is a partial sum of {x.dtype}, must be whole or sharded")
        for mode, size in counts.items():
            letter = rule.operands[x.name][mode]
            if letter is None:
                continue
            if letter in rule.whole:
                raise ValueError(f"{x.name} is sharded along mode {mode}, must not be: {rule.whole[letter]}")
            if not _divides(letter, size, call, rule):
                raise ValueError(
                    f"{x.name} has shape {x.shape}, of which {size} ranks cannot share mode {mode}: each must"
                    f" get a multiple of {max(rule.units[letter], 1)}"
                )


def _adds(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize > 1


def strategies(schema: OpSchema, call: Call, rule: Rule) -> OpStrategy:
    """The strategies of a call. ValueError for placements that cannot be."""
    check(call, rule)
    operands = list(call.operands.values())
    mesh: DeviceMesh = operands[0].spec.mesh
    names = [x.name for x in operands]
    found: list[OpSpec] = []
    for shares in itertools.product(*[list(_shares(rule, names))] * mesh.ndim):
        counts: dict[str, int] = {}
        for size, share in zip(mesh.shape, shares):
            if share.letter is not None:
                counts[share.letter] = counts.get(share.letter, 1) * size
        if not all(_divides(letter, size, call, rule) for letter, size in counts.items()):
            continue
        inputs = [
            DTensorSpec(mesh, tuple(placements), tensor_meta=x.strategy.tensor_meta)
            for x, placements in zip(operands, zip(*(share.operands for share in shares)))
        ]
        results = tuple(DTensorSpec(mesh, tuple(p)) for p in zip(*(share.results for share in shares)))
        costs = [generate_redistribute_costs(x.strategy, spec) for x, spec in zip(operands, inputs)]
        single = len(results) == 1 and not schema.return_type_list_tensor_like()
        found.append(OpSpec(results[0] if single else results, inputs, costs))
    return OpStrategy(found)


def broadcast(shape: Sequence[int], result: Modes) -> Modes:
    """The modes of a tensor that broadcasts to a result of these modes."""
    own = result[len(result) - len(shape) :] if len(shape) else ()
    return tuple(None if size == 1 else letter for size, letter in zip(shape, own))
