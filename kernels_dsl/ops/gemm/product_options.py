"""The options that `gemm` and its relatives share: each is of the right kind, and none is without effect.

Looked at where a call is first seen; a repeated one is found by its key, which holds their values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kernels_dsl.blocks.epilogue.activations import ACTIVATIONS
from kernels_dsl.checks import options
from kernels_dsl.config.gemm import Sm80GemmConfig, Sm90GemmConfig

FAMILIES = (None, "sm90", "sm80")
CONFIGS = (Sm90GemmConfig, Sm80GemmConfig)


def check(arguments_by_name: Mapping[str, Any]) -> None:
    """TypeError or ValueError names what is wrong among the options that are given, by their names."""
    for name in ("alpha", "beta"):
        options.number(name, arguments_by_name.get(name, 1.0))
    options.one_of("activation", arguments_by_name.get("activation"), (None, *sorted(ACTIVATIONS)))
    options.one_of("bias_axis", arguments_by_name.get("bias_axis", "n"), ("n", "m"))
    options.instance("out_dtype", arguments_by_name.get("out_dtype"), torch.dtype, type(None))
    options.boolean("use_fast_accum", arguments_by_name.get("use_fast_accum", False))
    options.boolean("batch_invariant", arguments_by_name.get("batch_invariant", False))
    arguments(arguments_by_name.get("epilogue_args", ()))
    epilogue = arguments_by_name.get("epilogue")
    if epilogue is not None and not isinstance(epilogue, str):
        if not callable(epilogue):
            raise TypeError(f"epilogue is {options.shown(epilogue)}, must be a function or a registered name")
        if not torch.compiler.is_compiling():
            from kernels_dsl.checks.functions import hash_of  # here, since most calls have no function

            hash_of("epilogue", epilogue)
    _check_companions(arguments_by_name)


def arguments(value: Any) -> tuple[Any, ...]:
    """epilogue_args as a tuple; TypeError for what is none, such as a single tensor."""
    return tuple(options.instance("epilogue_args", value, tuple, list))


def _check_companions(arguments_by_name: Mapping[str, Any]) -> None:
    """ValueError for an option that would have no effect without another one."""
    for name, default, other in (("beta", 1.0, "c"), ("bias_axis", "n", "bias")):
        if arguments_by_name.get(other) is None and arguments_by_name.get(name, default) != default:
            raise ValueError(
                f"{name} is {arguments_by_name[name]!r} and {other} is None, must be given together"
            )


def check_forced(config: Any, family: Any, configs: tuple[type, ...] = CONFIGS) -> None:
    """The same of what takes the place of the library's own choices."""
    options.instance("config", config, *configs, type(None))
    options.one_of("family", family, FAMILIES)
    if config is not None and family not in (None, config.family):
        raise ValueError(f"family is {family!r}, must be config's, {config.family!r}, or None")
