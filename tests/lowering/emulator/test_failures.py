"""Whatever is wrong with PTX, the error is an `EmulatorError` that names kernel, line and text."""

from __future__ import annotations

import random
import re

import pytest

torch = pytest.importorskip("torch")

from ptx_kernels import HEADER, INIT, REGISTERS, run, text, wait  # noqa: E402

from lowering.emulator import ptx  # noqa: E402
from lowering.emulator.memory import GlobalMemory  # noqa: E402
from lowering.emulator.reports import EmulatorError  # noqa: E402
from lowering.emulator.session import Session, extent  # noqa: E402
from lowering.emulator.state import Launch  # noqa: E402

BODY = (
    """
.reg .v2 .b32 %pair; .reg .v4 .f32 %quad; .reg .f32 %f<8>; .reg .f64 %d<4>;
.loc 1 7 3
ld.param.u64 %rd1, [p0];
cvta.to.global.u64 %rd2, %rd1;
mul.wide.u32 %rd3, %r1, 16;
add.s64 %rd4, %rd2, %rd3;
ld.global.v4.f32 %quad, [%rd4];
ld.global.nc.v2.u32 {%r10, %r11}, [%rd4+8];
mov.b64 {%r12, %r13}, %rd4;
add.cc.u32 %r14, %r10, %r11; addc.u32 %r15, %r12, 0;
fma.rn.f32 %f1, %quad.x, 0f3F800000, %quad.y;
cvt.rn.bf16x2.f32 %r16, %f1, %quad.z;
setp.lt.and.s32 %p4|%p5, %r10, %r11, %p1;
selp.b32 %r17, %r16, %r10, %p4;
prmt.b32 %r18, %r10, %r17, 0x5410;
dp4a.u32.s32 %r18, %r10, %r17, %r18;
lop3.b32 %r19, %r10, %r11, %r18, 0x96;
bfe.u32 %r20, %r19, 3, 7;
shfl.sync.bfly.b32 %r21|%p6, %r20, 1, 31, -1;
redux.sync.add.s32 %r22, %r21, -1;
vote.sync.ballot.b32 %r23, %p4, -1;
match.any.sync.b32 %r24, %r10, -1;
st.shared.b32 [%r5+256], %r22;
bar.sync 0;
ld.shared.b32 %r25, [%r5+256];
atom.shared.add.u32 %r26, [%r3+2048], 1;
red.global.add.u32 [%rd2], %r26;
mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%r30,%r31,%r32,%r33}, {%r10,%r11}, {%r12},"""
    """ {%r30,%r31,%r32,%r33};
ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r34, %r35}, [%r3+1024];
cp.async.ca.shared.global [%r5+512], [%rd4], 4;
cp.async.commit_group;
cp.async.wait_group 0;
"""
    + INIT
    + """
@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r3], 128;
@%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r3+512], [%rd2], 128, [%r3];
"""
    + wait()
    + """
$L_t: .branchtargets LA, LB;
and.b32 %r40, %r1, 1;
brx.idx %r40, $L_t;
LA: add.u32 %r41, %r40, 1;
LB: @%p4 bra LC;
st.global.b32 [%rd4], %r25;
LC:
"""
)
PLACE = re.compile(r"kernel k\b.*PTX line \d+", re.S)


def _whole() -> str:
    return '.file 1 "/somewhere/kernel.py"\n' + text(BODY, [torch.zeros(1)])


def _execute(source: str) -> None:
    tensor = torch.zeros(256, dtype=torch.int32)
    module = ptx.parse(source)
    memory = GlobalMemory()
    memory.register(*extent(tensor), "p0", False)
    session = Session("sm_90a", 0, raise_on_report=False)
    session.max_steps = 3000
    params = tensor.data_ptr().to_bytes(8, "little")
    session.execute(module, Launch("k", (1, 1, 1), (32, 1, 1), (1, 1, 1), 4096, params, {}), memory)


def test_the_program_that_is_mutated_is_right() -> None:
    _execute(_whole())


_WORDS = ["%r1", "%rd1", "%p1", "%f1", "{%r1, %r2}", "[%rd2]", "1", "0f3F800000", "_", "p0", "smem",
          "%tid.x", "%quad", "%r1|%p2", "!%p1", "-1", "%d1"]  # fmt: skip


def _mutated(chance: random.Random, first: int, lines: list[str]) -> str:
    """The program with one instruction changed: an operand, a character or a modifier."""
    at = chance.randrange(first, len(lines) - 3)
    line = lines[at]
    kind = chance.randrange(6)
    parts = re.split(r"(,\s*)", line)
    if kind == 0 and len(parts) > 1:
        at_part = chance.randrange(0, len(parts), 2)
        parts[at_part] = parts[at_part].split()[0] + " " if at_part == 0 else chance.choice(_WORDS)
        line = "".join(parts) + ("" if line.endswith(";") and parts[-1].endswith(";") else ";")
    elif kind == 1 and len(parts) > 2:
        del parts[chance.randrange(1, len(parts) - 1) // 2 * 2 + 1 :][:2]
        line = "".join(parts[:-2]) + ";"
    elif kind == 2 and line:
        i = chance.randrange(len(line))
        line = line[:i] + line[i + 1 :]
    elif kind == 3 and line:
        i = chance.randrange(len(line))
        line = line[:i] + chance.choice("{}[]();,.%@!$0aZ \"'#") + line[i:]
    elif kind == 4:
        pieces = line.split(".")
        i = chance.randrange(len(pieces))
        pieces[i] = chance.choice(
            ["b32", "f64", "b128", "x", "u16", "f16x2", "shared", "global", "v4", "sync"]
        )
        line = ".".join(pieces)
    else:
        line = line.rstrip(";") + ", " + chance.choice(_WORDS) + ";"
    return "\n".join([*lines[:at], line, *lines[at + 1 :]])


@pytest.mark.parametrize("seed", range(4))
def test_mutated_programs_fail_with_their_place(seed: int) -> None:
    chance = random.Random(seed)
    lines = _whole().split("\n")
    first = next(i for i, line in enumerate(lines) if line.startswith(".reg")) + 1
    refused = 0
    for _ in range(150):
        source = _mutated(chance, first, lines)
        try:
            _execute(source)
        except EmulatorError as error:
            refused += 1
            message = str(error)
            finding = error.reports and error.reports[-1].ptx_line > 0
            assert PLACE.search(message) or finding, message
    assert refused > 50


def test_the_source_line_is_named() -> None:
    for broken, line in (
        ("mov.b32 %r9;", 7),
        ("add.u32 %r9, %rx, %ry;", 7),
        ("mad.lo.q32 %r9, %r9, %r9;", 7),
    ):
        source = _whole().replace("mul.wide.u32", broken + "\nmul.wide.u32")
        with pytest.raises(EmulatorError) as caught:
            _execute(source)
        assert f"/somewhere/kernel.py:{line}" in str(caught.value), broken
        assert broken.rstrip(";") in str(caught.value)


def test_structure_errors_name_the_kernel() -> None:
    whole = _whole()
    for source in (
        whole.replace(".param .u64 p0", ".param .u64 p0 p1 p2"),
        whole[: whole.rindex("}")],
        whole.replace("bra LC", "bra NOWHERE"),
        whole.replace(".reg .pred %p<16>", ".reg .pred %p<99999999999>"),
    ):
        with pytest.raises(EmulatorError, match="kernel k"):
            _execute(source)


def test_vector_registers_load_and_store_whole() -> None:
    source = torch.arange(128, dtype=torch.int32)
    target = torch.zeros(128, dtype=torch.int32)
    body = """
.reg .v4 .b32 %quad; .reg .v2 .b64 %two;
ld.param.u64 %rd1, [p0]; ld.param.u64 %rd2, [p1];
mul.wide.u32 %rd3, %r1, 16; add.u64 %rd1, %rd1, %rd3; add.u64 %rd2, %rd2, %rd3;
ld.global.v4.b32 %quad, [%rd1];
add.u32 %quad.x, %quad.y, %quad.w;
st.global.v4.b32 [%rd2], %quad;
ld.global.v2.b64 %two, [%rd2];
mov.b64 {%r10, %r11}, %two.y;
st.global.b32 [%rd2+4], %r10;
"""
    assert not run(body, [source, target]).reports
    wanted = source.reshape(32, 4).clone()
    wanted[:, 0] = wanted[:, 1] + wanted[:, 3]
    wanted[:, 1] = wanted[:, 2]
    assert torch.equal(target.reshape(32, 4), wanted)


def test_the_header_of_the_tests_is_whole() -> None:
    assert HEADER in _whole() and REGISTERS in _whole()
