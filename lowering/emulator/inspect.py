"""Step and look: stop an emulated launch at a line and read registers, shared memory, barriers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .machine import Machine
    from .program import Step
    from .ptx import Instruction
    from .state import Warp


@dataclass
class Stop:
    """Point of execution: before ``instruction`` of ``warp``."""

    machine: Machine
    warp: Warp
    instruction: Instruction

    @property
    def source(self) -> str:
        """File and line of the Python source."""
        return self.machine.source(self.instruction)

    def register(self, name: str, dtype: str = "b32", lane: int | None = None) -> Any:
        """Value of a register such as ``%r12`` (or a special one such as ``%tid.x``) in all lanes or in one.

        :param dtype: how to read it: b32, s32, f32, b64, pred…
        :raises KeyError: if the kernel has no register of this name.
        """
        if name in self.warp.S:
            value = self.warp.S[name]
        else:
            found = self._registers().get(name)
            if found is None:
                raise KeyError(f"the instructions of {self.machine.kernel.name} use no register {name!r}")
            value = self.warp.value(found, dtype)
        return value if lane is None else value[lane]

    def _registers(self) -> dict[str, Any]:
        from .ptx import Address, Pair, Reg, Vector

        found: dict[str, Any] = {}

        def visit(operand: Any) -> None:
            if isinstance(operand, Reg):
                found[operand.name] = operand
            elif isinstance(operand, Vector):
                for item in operand.items:
                    visit(item)
            elif isinstance(operand, Pair):
                visit(operand.first)
                visit(operand.second)
            elif isinstance(operand, Address):
                visit(operand.base)
                for item in operand.coords:
                    visit(item)

        for ins in self.machine.kernel.instructions:
            for operand in ins.operands:
                visit(operand)
        return found

    def shared(self, offset: int, count: int, dtype: str = "uint8") -> np.ndarray:
        """``count`` elements of the CTA's shared memory from byte ``offset``.

        ``dtype`` is a NumPy name, or "bfloat16", which comes back as float32.
        """
        size = 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize
        raw = self.warp.cta.smem[offset : offset + count * size].copy()
        if dtype == "bfloat16":
            return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        return raw.view(dtype)

    def barriers(self) -> dict[int, str]:
        """State of each mbarrier of the CTA by its shared address."""
        return {offset: barrier.describe() for offset, barrier in self.warp.cta.mbarriers.items()}


class Inspector:
    """Calls ``look(stop)`` before chosen instructions.

    :param look: gets a `Stop`; whatever it raises ends the launch.
    :param line: source line, optionally with ``file`` (a suffix of the path).
    :param ptx_line: line of the PTX text.
    :param opcode: start of an opcode, such as ``"wgmma.mma_async"``.
    :param cta, warp: only there.
    """

    def __init__(
        self,
        look: Callable[[Stop], None],
        *,
        line: int | None = None,
        file: str = "",
        ptx_line: int | None = None,
        opcode: str = "",
        cta: tuple[int, int, int] | None = None,
        warp: int | None = None,
    ) -> None:
        if line is None and ptx_line is None and not opcode:
            raise ValueError("an Inspector needs line, ptx_line or opcode to know where to stop")
        self.look, self.line, self.file, self.ptx_line = look, line, file, ptx_line
        self.opcode, self.cta, self.warp = opcode, cta, warp
        self.stops = 0

    def before(self, machine: Machine, warp: Warp, step: Step) -> None:
        """Called by the machine before each step, which holds one instruction while an inspector is set."""
        ins = step.first
        if self.warp is not None and warp.number != self.warp:
            return
        if self.cta is not None and warp.cta.index != self.cta:
            return
        if self.ptx_line is not None and ins.line != self.ptx_line:
            return
        if self.opcode and not ins.opcode.startswith(self.opcode):
            return
        if self.line is not None:
            number, line, _ = ins.source
            if line != self.line or not machine.files.get(number, "").endswith(self.file):
                return
        self.stops += 1
        self.look(Stop(machine, warp, ins))
