"""Calls that must be refused, by an error that names the argument, with nothing written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import torch

import kernels_dsl
from tests.fuzz.case import Call, Mode, Settings
from tests.fuzz.draw import Draw
from tests.fuzz.memory import Arena
from tests.fuzz.planted import Operations

Arguments = dict[str, Any]
Case = TypeVar("Case", bound="RefusalCase")


@dataclass(frozen=True)
class Refusal:
    """A change of a good call's arguments. named: what the error must name. checked: values are wrong, which
    `kernels_dsl.checked` alone sees."""

    named: str
    change: Callable[[Arguments], Any]
    checked: bool = False


def setting(
    name: str, make: Callable[[Arguments], Any], named: str | None = None, checked: bool = False
) -> Refusal:
    """Argument `name` becomes what `make` returns."""
    return Refusal(named or name, lambda arguments: arguments.update({name: make(arguments)}), checked)


def int32(*values: int) -> Callable[[Arguments], torch.Tensor]:
    """Makes an int32 tensor on q's device."""
    return lambda arguments: torch.tensor(values, dtype=torch.int32, device=arguments["q"].device)


@dataclass(frozen=True)
class RefusalCase:
    """A call of `operation` with a change of its table. tables: the changes, by operation."""

    tables: ClassVar[dict[str, dict[str, Refusal]]]
    draw: Draw = field(repr=False)
    operation: str
    change: str
    mode: Mode = Mode.PLAIN

    def __str__(self) -> str:
        return f"{self.operation}, refused: {self.change}"

    @property
    def features(self) -> tuple[str, ...]:
        """For coverage: refused calls do not count."""
        return (str(self),)

    def build(self, arena: Arena, settings: Settings) -> Call:
        """The call on tensors in `arena`."""
        refusal, owner = self.tables[self.operation][self.change], self._owner(settings)
        arguments = self._arguments(arena, settings)
        refusal.change(arguments)

        def run() -> tuple[torch.Tensor, ...]:
            with kernels_dsl.checked(refusal.checked):
                getattr(owner, self.operation)(**arguments)
            return ()

        return Call(run, check=lambda _: None, arguments=(refusal.named,), must_refuse=refusal.named)

    def _owner(self, settings: Settings) -> Any:
        """The module or object that has the operation."""
        return Operations(settings)

    def _arguments(self, arena: Arena, settings: Settings) -> Arguments:
        """Those of a call that would be fine."""
        raise NotImplementedError


def draw_refusal(case: type[Case], draw: Draw) -> Case:
    """A call that must be refused."""
    changes = [(operation, change) for operation, table in case.tables.items() for change in table]
    operation, change = draw.data.choice(changes)
    return case(draw, operation, change)
