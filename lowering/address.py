"""Memory that a launch gets as a number."""

from __future__ import annotations

from typing import Any


class Address(int):
    """Address of a tensor's first element, for a parameter annotated `Int64`; a launch takes it in a fraction
    of the time that a tensor takes. It keeps the tensor, and tells the emulator which memory the kernels may
    touch.

    The host function makes the tensor: `cute.make_ptr(dtype, address, cute.AddressSpace.gmem,
    assumed_align=n)`; that the memory is so aligned is for the caller to see to, no signature says it.
    """

    tensor: Any

    def __new__(cls, tensor: Any) -> Address:
        """tensor: a torch tensor; the address is the one that it has now."""
        made = super().__new__(cls, tensor.data_ptr())
        made.tensor = tensor
        return made
