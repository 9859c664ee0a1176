"""Hand-written PTX kernels for the emulator's tests, and what runs them on CPU tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lowering.emulator import ptx
from lowering.emulator.memory import GlobalMemory
from lowering.emulator.session import Session, extent
from lowering.emulator.state import Launch

HEADER = """.version 8.8
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry k(
"""
REGISTERS = """
.reg .pred %p<16>; .reg .b16 %rs<32>; .reg .b32 %r<256>; .reg .b64 %rd<64>;
mov.u32 %r0, %tid.x;
and.b32 %r1, %r0, 31;
shr.u32 %r2, %r0, 5;
mov.u32 %r3, smem;
setp.eq.u32 %p1, %r0, 0;
setp.eq.u32 %p2, %r2, 0;
setp.eq.u32 %p3, %r2, 1;
shl.b32 %r4, %r0, 2;
add.u32 %r5, %r3, %r4;
"""


@dataclass(frozen=True)
class TensorMap:
    """A 2-D tensor map over a contiguous tensor, encoded as lowering.emulator.semantics.tma documents."""

    tensor: torch.Tensor
    box: tuple[int, int]  # columns, rows
    swizzle: int = 0  # 0 none, 1 32B, 2 64B, 3 128B

    def encode(self) -> bytes:
        rows, columns = self.tensor.shape
        kind = {torch.float32: 7, torch.bfloat16: 10, torch.float16: 6, torch.uint8: 0, torch.int32: 3}[
            self.tensor.dtype
        ]
        words = [0] * 16
        words[0] = self.tensor.data_ptr()
        words[1] = 2 | 1 << 4 | kind << 7 | self.swizzle << 13
        words[1] |= (columns * self.tensor.element_size() // 16) << 32
        words[4] = (columns - 1) | (rows - 1) << 32
        box = (self.box[0] - 1) | (self.box[1] - 1) << 8
        words[6] = (box & 0xFF) << 56
        words[7] = box >> 8
        return b"".join(w.to_bytes(8, "little") for w in words)


def text(body: str, arguments: list) -> str:
    """A kernel ``k`` whose parameters p0, p1... match ``arguments`` (tensors, ints, tensor maps)."""
    declared = []
    for i, argument in enumerate(arguments):
        if isinstance(argument, TensorMap):
            declared.append(f".param .align 64 .b8 p{i}[128]")
        else:
            declared.append(f".param .{'u32' if isinstance(argument, int) else 'u64'} p{i}")
    return HEADER + ",\n".join(declared) + "\n)\n{" + REGISTERS + body + "\nret;\n}\n"


def run(
    body: str,
    arguments: list,
    *,
    block: int = 32,
    grid: int = 1,
    smem: int = 4096,
    cluster: int = 1,
    seed: int = 0,
    unwritten: tuple = (),
    inspector: object = None,
    sms: int | None = None,
    session: Session | None = None,
    attributes: dict | None = None,
) -> Session:
    """Execute ``body`` and return the session, a new one if none is given.

    Findings are collected, a stop is still raised.
    """
    module = ptx.parse(text(body, arguments))
    params = bytearray()
    memory = GlobalMemory()
    for i, (argument, declared) in enumerate(zip(arguments, module.kernels["k"].params)):
        params.extend(b"\0" * (declared.offset - len(params)))
        if isinstance(argument, int):
            params.extend(argument.to_bytes(4, "little"))
            continue
        tensor = argument.tensor if isinstance(argument, TensorMap) else argument
        params.extend(
            argument.encode() if isinstance(argument, TensorMap) else tensor.data_ptr().to_bytes(8, "little")
        )
        memory.register(*extent(tensor), f"p{i}", any(tensor is u for u in unwritten))
    session = session or Session("sm_90a", seed, raise_on_report=False, inspector=inspector, sms=sms)
    shape = (grid, 1, 1), (block, 1, 1), (cluster, 1, 1)
    session.execute(module, Launch("k", *shape, smem, bytes(params), attributes or {}), memory)
    return session


INIT = """
@%p1 mbarrier.init.shared.b64 [%r3], 1;
fence.mbarrier_init.release.cluster;
bar.sync 0;
"""


def wait(parity: int | str = 0, barrier: str = "%r3") -> str:
    """A blocking wait, as the compiler writes it."""
    return f"""{{
.reg .pred P1; .reg .b32 PH;
mov.b32 PH, {parity};
LAB_WAIT:
mbarrier.try_wait.parity.shared.b64 P1, [{barrier}], PH, 10000000;
@P1 bra.uni DONE;
bra.uni LAB_WAIT;
DONE:
}}
"""
