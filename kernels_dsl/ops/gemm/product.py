"""The eager call of a product by `gemm`'s kernels, of arguments (a, b, extras, options, out, forced)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kernels_dsl.ops import call_cache, overlap
from kernels_dsl.ops.eager_path import (
    PLAIN_TYPES,
    check_memory,
    check_output,
    needs_dispatcher,
    signature,
    watched,
    written_out,
)
from kernels_dsl.ops.gemm import plan as gemm_plan
from kernels_dsl.ops.gemm import product_options
from kernels_dsl.ops.target import target_of


class Product:
    """One such product; `GemmOperator` makes an operator of it.

    extras: names of the tensors, or None, that a call has behind a and b; the epilogue's arguments follow
    them. options: names of the other arguments and their defaults, alpha first. written: the one of the
    extras, if any, that is a float32 number which starts at 0 and which the kernel writes. described: (a, b,
    extras, options, out) -> the checked call. operator: gives the `GemmOperator`.
    """

    def __init__(
        self,
        name: str,
        *,
        extras: tuple[str, ...],
        options: dict[str, Any],
        described: Callable[..., Any],
        operator: Callable[[], Callable[..., torch.Tensor]],
        written: str | None = None,
    ) -> None:
        self.name, self.extras, self.options, self.described = name, extras, options, described
        self.written = written
        self._operator = operator
        self._beta = list(options).index("beta") if "beta" in options else None
        self._written = None if written is None else extras.index(written)
        self._plans: dict[Any, Any] = {}

    def __call__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        extras: tuple[Any, ...],
        options: tuple[Any, ...],
        out: torch.Tensor | None,
        forced: tuple[Any, str | None],
        usual: tuple[Any, ...] | None = None,
        given: Any = None,
    ) -> torch.Tensor:
        """A call from the public function. forced: configuration, family.

        usual: a, b and those of the extras and of out that there are, in a call without written tensor and
        epilogue's arguments; None for others, which take longer. given: which ones these are.
        """
        key: Any = None
        if usual is not None and type(a) in PLAIN_TYPES and type(b) in PLAIN_TYPES:
            try:
                key = (a.shape, b.shape, given, options, forced)
            except RuntimeError:  # of a nested tensor, which has no shape
                usual = None
        if key is not None:
            plan = call_cache.find(self._plans, key, usual or ())
            if plan is not None and (
                out is None or not overlap.ranges_meet(out, (a, b, *extras), plan.extents)
            ):
                make = plan.operands
                beta = 1.0 if self._beta is None else float(options[self._beta])
                try:
                    operands = None if make is None else make((float(options[0]), beta, *extras))
                    return plan.run(a, b, out, operands)
                except ValueError:
                    call_cache.look_at_addresses(self._plans, key)
        return self._unknown(a, b, extras, options, out, forced, (key, usual or ()))

    def _unknown(
        self, a: Any, b: Any, extras: Any, options: Any, out: Any, forced: Any, known: tuple[Any, Any]
    ) -> torch.Tensor:
        """A call that was not found; `known`: what it is to be kept by."""
        product_options.check({**dict(zip(self.options, options)), **dict(zip(self.extras, extras))})
        product_options.check_forced(*forced)
        if not watched():
            written = None if self._written is None else extras[self._written]
            for name, tensor in (("out", out), (str(self.written), written)):
                if tensor is not None:
                    check_output(name, tensor)
            tensors = written_out((a, b, *extras))
            if tensors is not None:
                a, b, *rest = tensors
                extras, known = tuple(rest), (None, ())
        if needs_dispatcher((a, b, out, *extras)):
            return self._operator()(a, b, extras, options, out, forced)
        plan = self._plan_of(a, b, extras, options, out, forced)
        result = self._checked(plan, a, b, extras, options, out)
        if known[0] is not None and not target_of(a).emulated:
            call_cache.keep(self._plans, *known, plan)
        return result

    def run_direct(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        extras: tuple[Any, ...],
        options: tuple[Any, ...],
        out: torch.Tensor | None,
        forced: tuple[Any, str | None],
    ) -> torch.Tensor:
        """A call past the dispatcher."""
        plan = self._plan_of(a, b, extras, options, out, forced)
        return self._checked(plan, a, b, extras, options, out)

    def _plan_of(self, a: Any, b: Any, extras: Any, options: Any, out: Any, forced: Any) -> gemm_plan.Plan:
        key = (signature(a), signature(b), *map(signature, extras), options, forced, signature(out))
        plan: gemm_plan.Plan | None = self._plans.get(key)
        if plan is None:
            plan = self._plan(a, b, extras, options, out, forced)
            check_memory({**self._named(a, b, extras), "out": out})
            if not target_of(a).emulated:  # the emulator may be another one next time
                call_cache.put(self._plans, key, plan)
        return plan

    def _checked(
        self, plan: gemm_plan.Plan, a: Any, b: Any, extras: Any, options: Any, out: Any
    ) -> torch.Tensor:
        """Follow a plan, after what depends on addresses was looked at."""
        if out is not None and overlap.ranges_meet(out, (a, b, *extras), plan.extents):
            overlap.check_overlap(out, self._named(a, b, extras))
        if self._written is not None and extras[self._written] is not None:
            others = {**self._named(a, b, extras), "out": out}
            overlap.check_alone(str(self.written), others.pop(str(self.written)), others)
            extras[self._written].zero_()
        make = plan.operands
        beta = 1.0 if self._beta is None else float(options[self._beta])
        return plan.run(a, b, out, None if make is None else make((float(options[0]), beta, *extras)))

    def _plan(self, a: Any, b: Any, extras: Any, options: Any, out: Any, forced: Any) -> gemm_plan.Plan:
        call = self.described(a, b, extras, options, out)
        overlap.check_self_overlap(out)
        return gemm_plan.build(call, a, b, out, target_of(a), forced[0], forced[1], extras)

    def _named(self, a: Any, b: Any, extras: tuple[Any, ...]) -> dict[str, torch.Tensor]:
        named = dict(zip(("a", "b", *self.extras), (a, b, *extras)))
        named.update((f"epilogue_args[{i}]", x) for i, x in enumerate(extras[len(self.extras) :]))
        return {name: x for name, x in named.items() if isinstance(x, torch.Tensor)}

    def plan_for(
        self, a: torch.Tensor, b: torch.Tensor, *, config: Any = None, family: str | None = None,
        out: torch.Tensor | None = None, **arguments: Any,
    ) -> gemm_plan.Plan:  # fmt: skip
        """The plan that a call with these arguments would follow."""
        extras = (
            *[arguments.pop(name, None) for name in self.extras],
            *product_options.arguments(arguments.pop("epilogue_args", ())),
        )
        options = tuple([arguments.pop(name, default) for name, default in self.options.items()])
        if arguments:
            raise TypeError(f"{sorted(arguments)[0]} is given, must not: {self.name} has no such argument")
        return self._plan(a, b, extras, options, out, (config, family))

    def why_not(self, *tensors: Any, **arguments: Any) -> str | None:
        """Why a call with these arguments cannot run here; None if it can. Compiles nothing."""
        try:
            self.plan_for(*tensors, **arguments)
        except (TypeError, ValueError) as error:
            return str(error)
        return None
