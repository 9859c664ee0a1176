"""The memory model of the emulator against hardware: what a GPU shows in litmus tests, the model allows.

Run with `-rP` to see how often each outcome came.
"""

from __future__ import annotations

import ctypes
from collections import Counter

import pytest

torch = pytest.importorskip("torch")

from litmus import LITMUS, Litmus  # noqa: E402

from lowering.arch import ask_driver  # noqa: E402

KERNEL = """.version 8.0
.target sm_80
.address_size 64
.visible .entry k(.param .u64 p0, .param .u64 p1, .param .u64 p2)
{{
.reg .pred %p<16>; .reg .b32 %r<80>; .reg .b64 %rd<32>;
ld.param.u64 %rd10, [p0];
ld.param.u64 %rd12, [p1];
ld.param.u64 %rd14, [p2];
mov.u32 %r0, %tid.x;
mov.u32 %r1, %ntid.x;
mov.u32 %r2, %ctaid.x;
mov.u32 %r3, %nctaid.x;
shr.u32 %r4, %r3, 1;
rem.u32 %r5, %r2, %r4;
setp.lt.u32 %p10, %r2, %r4;
mul.wide.u32 %rd20, %r5, 4;
add.u64 %rd14, %rd14, %rd20;
setp.ne.u32 %p1, %r0, 0;
@%p1 bra MET;
atom.add.acq_rel.gpu.global.u32 %r6, [%rd14], 1;
WAIT:
ld.acquire.gpu.global.u32 %r6, [%rd14];
setp.lt.u32 %p2, %r6, 2;
@%p2 bra WAIT;
MET:
bar.sync 0;
mad.lo.u32 %r7, %r5, %r1, %r0;
mul.wide.u32 %rd20, %r7, 256;
add.u64 %rd10, %rd10, %rd20;
mul.wide.u32 %rd21, %r7, 8;
add.u64 %rd12, %rd12, %rd21;
mov.b32 %r61, 1;
@!%p10 bra SECOND;
{first}
bra END;
SECOND:
{second}
END:
ret;
}}
"""
THREADS, LAUNCHES = 256, 100


def _outcomes(litmus: Litmus) -> Counter:
    """Outcomes by their number: each thread of a pair of CTAs is a test of its own."""
    text = KERNEL.format(first=litmus.first, second=litmus.second).encode() + b"\0"
    torch.zeros(1, device="cuda")  # brings the context up
    library = ask_driver("cuLibraryLoadData", text, None, None, 0, None, None, 0)
    function = ask_driver("cuKernelGetFunction", ask_driver("cuLibraryGetKernel", library, b"k"))
    pairs = torch.cuda.get_device_properties(0).multi_processor_count // 2  # all are resident
    found: Counter = Counter()
    for _ in range(LAUNCHES):
        words = torch.zeros(pairs * THREADS, 64, dtype=torch.int32, device="cuda")
        result = torch.full((pairs * THREADS, 2), -1, dtype=torch.int32, device="cuda")
        met = torch.zeros(pairs, dtype=torch.int32, device="cuda")
        pointers = tuple(x.data_ptr() for x in (words, result, met))
        stream = torch.cuda.current_stream().cuda_stream
        grid, block, arguments = (2 * pairs, 1, 1), (THREADS, 1, 1), (pointers, (ctypes.c_void_p,) * 3)
        ask_driver("cuLaunchKernel", function, *grid, *block, 0, stream, arguments, 0)
        found.update(map(tuple, result.tolist()))
    ask_driver("cuLibraryUnload", library)
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("name", LITMUS)
def test_a_gpu_shows_what_the_model_allows(name: str) -> None:
    """All outcomes of a hundred launches; a single one that is not allowed fails."""
    found = _outcomes(LITMUS[name])
    print(f"{name}: " + ", ".join(f"{outcome} {count}" for outcome, count in sorted(found.items())))
    assert set(found) <= LITMUS[name].allowed
