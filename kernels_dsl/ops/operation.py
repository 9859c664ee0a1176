"""The ritual of a call, once for all operations: key → call cache → dispatcher → plan → run.

A call is a frozen record of its arguments. A public function looks for a plan by a key of its own, without a
record; where there is none it hands a record to `Operation.first`. An operator of PyTorch hands one to
`Operation.run`, as its implementation runs below the dispatcher.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass, replace
from typing import Any, ClassVar, Generic, TypeVar

import torch

from kernels_dsl.checks.eager_path import (
    check_memory,
    check_output,
    needs_dispatcher,
    only_recorded,
    prepare_sharded,
    signature,
    watched,
    written_out,
)
from kernels_dsl.checks.overlap import check_self_overlap
from kernels_dsl.ops import call_cache
from kernels_dsl.ops.sm_margin import with_margin
from kernels_dsl.ops.target import Target, target_of

SCHEMA_TYPES = {
    "torch.Tensor": "Tensor", "torch.Tensor | None": "Tensor?", "tuple[Any, ...]": "Tensor[]?",
    "bool": "bool", "int": "int", "float": "float", "str": "str", "torch.dtype": "ScalarType",
    "int | None": "int?", "float | None": "float?", "str | None": "str?",
    "torch.dtype | None": "ScalarType?", "bool | str": "str", "tuple[int, int]": "SymInt[]", "Named": "str?",
}  # fmt: skip
"""Annotation of a record's field -> its type in the schema. `Named`: a function or an object, which goes by a
name."""
Named = Any
Call = TypeVar("Call", bound="Arguments")
Plan = TypeVar("Plan")
Self = TypeVar("Self")


class Arguments:
    """Base of the call records: fields in the order of the operator's schema.

    `outputs` are written, in place of what a call would return or beside it. Fields in `unlisted` have no
    place in a schema. `aliases`: what the caller knows a field as, where that is not its name.
    """

    outputs: ClassVar[tuple[str, ...]] = ("out",)
    unlisted: ClassVar[tuple[str, ...]] = ()
    required: ClassVar[tuple[str, ...]] = ()
    """Fields that have a default here and none in the schema."""
    leading: ClassVar[str] = "a"
    """The tensor on whose device the call runs."""
    types: ClassVar[dict[str, str]]
    """Field, without the outputs -> type in the schema."""
    tensors: ClassVar[tuple[str, ...]]
    """Fields that are tensors or tuples of them, without the outputs."""
    lists: ClassVar[tuple[str, ...]]
    """Those that are tuples."""
    choices: ClassVar[tuple[str, ...]]
    """Fields that are no tensors, alpha and beta apart."""

    def __init_subclass__(cls) -> None:
        hidden = (*cls.outputs, *cls.unlisted)
        own = inspect.get_annotations(cls).items()
        listed = {name: text for name, text in own if name not in hidden and not text.startswith("ClassVar")}
        inherited: dict[str, str] = cls.types if is_dataclass(cls) else {}
        cls.types = {**inherited, **{name: SCHEMA_TYPES[text] for name, text in listed.items()}}
        cls.tensors = tuple(name for name, kind in cls.types.items() if kind.startswith("Tensor"))
        cls.lists = tuple(name for name, kind in cls.types.items() if kind == "Tensor[]?")
        beside = (*cls.tensors, "alpha", "beta")
        cls.choices = tuple(name for name in cls.types if name not in beside)

    @property
    def aliases(self) -> Mapping[str, str]:
        """Field -> the caller's name for it, where that is another one."""
        return {}

    def read(self) -> dict[str, Any]:
        """All that the call reads and may be a tensor, by the caller's names."""
        found: dict[str, Any] = {}
        aliases = self.aliases
        for name in self.tensors:
            value = getattr(self, name)
            if name in self.lists:
                found.update((f"{name}[{i}]", x) for i, x in enumerate(value))
            else:
                found[aliases.get(name, name)] = value
        return found

    def written(self) -> dict[str, Any]:
        """The outputs that are given."""
        found = {name: getattr(self, name) for name in self.outputs}
        return {name: value for name, value in found.items() if value is not None}

    def check(self) -> None:
        """TypeError or ValueError for an option that is wrong."""

    def refuse_gradients(self) -> None:
        """ValueError where gradients are asked for that do not exist."""

    def plan_key(self) -> Any:
        """All that a plan depends on. Of alpha and beta that is whether they have no effect."""
        fields = vars(self)
        layouts = [
            signature(fields[name]) for name in (*self.tensors, *self.outputs) if name not in self.lists
        ]
        layouts += [signature(x) for name in self.lists for x in fields[name]]
        options = [fields[name] for name in self.choices]
        return fields.get("alpha") == 1.0, fields.get("beta") == 0.0, *layouts, *options

    def in_memory(self: Self) -> Self:
        """The record with negated views as tensors of memory; the same where there are none."""
        changed: dict[str, Any] = {}
        for name in self.tensors:  # type: ignore[attr-defined]
            value = getattr(self, name)
            if name not in self.lists:  # type: ignore[attr-defined]
                if isinstance(value, torch.Tensor) and value.is_neg():
                    (changed[name],) = written_out((value,)) or (value,)
            elif isinstance(value, (tuple, list)) and (made := written_out(value)) is not None:
                changed[name] = made
        return replace(self, **changed) if changed else self  # type: ignore[type-var]


class Operation(Generic[Call, Plan]):
    """An operation: checks, plan and launch of its calls.

    `describe`: call -> what it asks for, checked, by shapes, dtypes and devices alone. `build`: (that, call,
    target) -> its plan. `follow`: (plan, call) -> the result, after what depends on addresses was looked at.
    """

    most_plans = call_cache.MAX_KEYS

    def __init__(
        self,
        name: str,
        record: type[Call],
        describe: Callable[[Call], Any],
        build: Callable[[Any, Call, Target], Plan],
        follow: Callable[[Plan, Call], Any],
    ) -> None:
        self.name, self.record = name, record
        self.describe, self._build, self._follow = describe, build, follow
        self.calls: dict[Any, Any] = {}
        self.plans: dict[Any, Any] = {}

    def first(
        self,
        call: Call,
        key: Any,
        tensors: tuple[Any, ...],
        operator: Callable[[], Callable[[Call], Any]],
    ) -> Any:
        """A call that the call cache does not have; by `key` and `tensors` it does from then on.

        `operator`: gives what makes the call an operator's, for a call that something watches.
        """
        call.check()
        if not watched():
            for name, output in call.written().items():
                check_output(name, output)
            here = call.in_memory()
            if here is not call:
                call, key = here, None
        if not self.seen_as_operator(call):
            return self.first_below(call, key, tensors)
        prepare_sharded((*call.read().values(), *call.written().values()))
        recorded = self.recorded(call, operator) if only_recorded(tuple(call.read().values())) else None
        if recorded is None:
            return operator()(call)
        result = recorded.of_call(call, self.calls_of(call))
        self._keep(call, key, tensors, recorded)
        return result

    def first_below(self, call: Call, key: Any, tensors: tuple[Any, ...]) -> Any:
        """The same for a call that nothing watches, its negated views written out."""
        plan = self.plan_of(call)
        result = self._follow(plan, call)
        self._keep(call, key, tensors, self.entry(plan, call, tensors))
        return result

    def _keep(self, call: Call, key: Any, tensors: tuple[Any, ...], entry: Any) -> None:
        if key is not None and entry is not None and not self.target_of(call).emulated:
            call_cache.keep(self.calls_of(call), key, tensors, entry)

    def recorded(self, call: Call, operator: Callable[[], Callable[[Call], Any]]) -> Any:
        """Runs such calls as nodes of autograd (`of_call`), without the dispatcher; the call cache has it.

        None: the operator records them. ValueError where gradients are asked for that do not exist.
        """
        return None

    def seen_as_operator(self, call: Call) -> bool:
        """True if torch.compile, a mode, a transform, autograd or a tensor subclass must see the call."""
        return needs_dispatcher((*call.read().values(), *call.written().values()))

    def entry(self, plan: Plan, call: Call, tensors: tuple[Any, ...]) -> Any:
        """The entry of the call cache for a call that was served; None for no entry."""
        return plan

    def calls_of(self, call: Call) -> dict[Any, Any]:
        """The call cache of such calls."""
        return self.calls

    def plans_of(self, call: Call) -> dict[Any, Any]:
        """The plans of such calls, by all that these depend on."""
        return self.plans

    def run(self, call: Call) -> Any:
        """A call below the dispatcher and autograd."""
        return self._follow(self.plan_of(call), call)

    def plan_of(self, call: Call) -> Plan:
        """The plan of a call, made where there is none for such calls."""
        key, plans = with_margin(call.plan_key()), self.plans_of(call)
        plan: Plan | None = None
        try:
            plan = plans.get(key)
        except TypeError:  # an argument that has no hash, which the checks name
            pass
        if plan is None:
            plan = self.new_plan(call)
            check_memory({**call.read(), **call.written()})
            if not self.target_of(call).emulated:  # the emulator may be another one next time
                call_cache.put(plans, key, plan, self.most_plans)
        return plan

    def new_plan(self, call: Call) -> Plan:
        """A plan of the call's own. TypeError and ValueError name what is wrong with an argument."""
        described = self.describe(call)
        if "out" in call.outputs:
            check_self_overlap(getattr(call, "out"))  # noqa: B009
        return self._build(described, call, self.target_of(call))

    def target_of(self, call: Call) -> Target:
        """The place where the call runs. ValueError where nothing can."""
        return target_of(getattr(call, call.leading), call.aliases.get(call.leading, call.leading))

    def call_of(self, **arguments: Any) -> Call:
        """The record of arguments by name. TypeError for one that the operation does not have."""
        for name in arguments:
            if name not in self.record.types and name not in (*self.record.outputs, "config"):
                raise TypeError(f"{name} is given, must not: {self.name} has no such argument")
        return self.record(**arguments)

    def why_not(self, **arguments: Any) -> str | None:
        """Says why a call with these arguments cannot run here; None if it can. Compiles nothing."""
        try:
            self.new_plan(self.call_of(**arguments).in_memory())
        except (TypeError, ValueError) as error:
            return str(error)
        return None
