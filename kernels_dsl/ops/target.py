"""The place where a call runs: a GPU, or the emulator for CPU tensors."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import lru_cache

import torch

from kernels_dsl.config.problem import DEVICES_BY_ARCH, Device
from kernels_dsl.ops.sm_margin import BLOCKS, without_margin
from lowering.records import frozen


@frozen
class Target:
    """A place to run kernels. `index` is the CUDA device's, -1 for the emulator."""

    device: Device
    index: int
    emulated: bool = False

    def families(self, forced: str | None, name: str = "a") -> tuple[str, ...]:
        """Kernel families to consider, the fastest first. ValueError where `forced` cannot run here.

        `name` is the argument that is on this device, for the message.
        """
        able = self.device.families()
        if forced is None:
            if not able:
                major, minor = self.device.capability
                raise ValueError(
                    f"{name} is on {self.device.name} of compute capability {major}.{minor}, must be 8.0 or "
                    "later"
                )
            return able
        if forced not in ("sm90", "sm80"):
            raise ValueError(f"family is {forced!r}, must be None, 'sm90' or 'sm80'")
        if forced not in able:
            major, minor = self.device.capability
            raise ValueError(
                f"family is {forced!r}, must be one of {able}: {self.device.name} has compute capability "
                f"{major}.{minor}"
            )
        return (forced,)


@lru_cache(maxsize=64)
def _gpu(index: int) -> Target:
    found = torch.cuda.get_device_properties(index)
    smem = found.shared_memory_per_block_optin
    return Target(Device(found.name, (found.major, found.minor), found.multi_processor_count, smem), index)


def _emulated() -> Target | None:
    """The emulator's target while one is active. ValueError for an arch that no device stands for."""
    from lowering.function import emulated_arch, emulated_sms

    arch_name = emulated_arch()
    if arch_name is None:
        return None
    if arch_name not in DEVICES_BY_ARCH:
        raise ValueError(f"the emulated arch is {arch_name!r}, must be one of {', '.join(DEVICES_BY_ARCH)}")
    device, sms = DEVICES_BY_ARCH[arch_name], emulated_sms()
    return Target(device if sms is None else replace(device, sm_count=sms), -1, emulated=True)


def target_of(tensor: torch.Tensor, name: str = "a") -> Target:
    """The place where a call with this tensor, the argument `name`, runs. ValueError for a CPU tensor without
    the emulator."""
    if tensor.is_cuda:
        front = sys.modules.get("lowering.emulator.front")  # loaded with the emulator alone
        if front is not None and front.pretending():
            raise ValueError(
                f"{name} is on the GPU that lowering.emulator.run(torch_cuda=True) pretends, must be on the "
                "CPU: kernels_dsl runs emulated on CPU tensors"
            )
        target: Target | None = _gpu(tensor.get_device())
    else:
        target = _emulated() if tensor.device.type == "cpu" else None
    if target is None:
        raise ValueError(
            f"{name} is on {tensor.device}, must be on a CUDA device (or on the CPU inside "
            "lowering.emulator.run)"
        )
    return replace(target, device=without_margin(target.device)) if BLOCKS else target
