"""Emulated calls, seeds, the inspector, the timeline, the counts, and the arguments of host functions."""

from __future__ import annotations

import struct

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from ptx_kernels import INIT, TensorMap, run, wait  # noqa: E402

from lowering import emulator  # noqa: E402
from lowering.emulator import capture, ptx, tensormaps  # noqa: E402
from lowering.emulator.semantics import tma  # noqa: E402
from lowering.emulator.timeline import Event, draw_plot, draw_text, select  # noqa: E402

# A TMA load of an 8x8 int32 tile, then every lane stores two of its elements.
COPY = (
    INIT
    + """
mov.b64 %rd6, p0;
cvta.param.u64 %rd7, %rd6;
mov.b32 %r50, {column};
mov.b32 %r51, {row};
@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r3], 256;
@%p1 cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes
    [%r3+128], [%rd7, {{%r50, %r51}}], [%r3];
"""
    + wait().replace("{", "{{").replace("}", "}}")
    + """
ld.param.u64 %rd1, [p1];
cvt.u64.u32 %rd2, %r4;
add.u64 %rd3, %rd1, %rd2;
ld.shared.b32 %r10, [%r5+128];
ld.shared.b32 %r11, [%r5+256];
st.global.b32 [%rd3], %r10;
st.global.b32 [%rd3+128], %r11;
"""
)


@pytest.mark.parametrize(("column", "row"), [(0, 0), (4, 10), (-4, 2), (20, 14)])
def test_a_tensor_copy_fills_what_lies_outside_with_zeros(column: int, row: int) -> None:
    source = torch.arange(16 * 24, dtype=torch.int32).view(16, 24) + 1
    target = torch.full((8, 8), -1, dtype=torch.int32)
    body = COPY.format(column=column & 0xFFFFFFFF, row=row)
    session = run(body, [TensorMap(source, (8, 8)), target])
    expected = torch.zeros(8, 8, dtype=torch.int32)
    for i in range(8):
        for j in range(8):
            if 0 <= row + i < 16 and 0 <= column + j < 24:
                expected[i, j] = source[row + i, column + j]
    assert torch.equal(target, expected)
    assert not session.reports


def test_the_inspector_sees_registers_memory_and_barriers() -> None:
    source = torch.arange(16 * 24, dtype=torch.int32).view(16, 24)
    seen = []

    def look(stop: emulator.Stop) -> None:
        seen.append(
            (
                stop.warp.number,
                stop.register("%r50", "s32", lane=0),
                stop.register("%tid.x").tolist(),
                stop.shared(1024 + 128, 4, "int32").tolist(),
                stop.barriers(),
            )
        )

    inspector = emulator.Inspector(look, opcode="ld.param.u64", warp=0)
    run(COPY.format(column=4, row=0), [TensorMap(source, (8, 8)), torch.zeros(64)], inspector=inspector)
    assert inspector.stops == 1
    warp, column, lanes, tile, barriers = seen[0]
    assert (warp, column, lanes) == (0, 4, list(range(32)))
    assert tile == [4, 5, 6, 7]
    assert barriers == {1024: "phase 1, 0 of 1 arrivals"}


def test_an_inspector_needs_a_place() -> None:
    with pytest.raises(ValueError, match="needs line, ptx_line or opcode"):
        emulator.Inspector(print)


def test_an_inspector_knows_its_registers() -> None:
    def look(stop: emulator.Stop) -> None:
        stop.register("%nothing")

    with pytest.raises(KeyError, match="no register '%nothing'"):
        run("mov.b32 %r10, 1;", [torch.zeros(1)], inspector=emulator.Inspector(look, opcode="mov.b32"))


CONFLICTS = "shl.b32 %r10, %r1, {shift}; add.u32 %r11, %r3, %r10; st.shared.b32 [%r11], %r1;"


@pytest.mark.parametrize(("shift", "conflicts"), [(2, 0), (3, 1), (5, 7), (7, 31)])
def test_bank_conflicts_are_counted(shift: int, conflicts: int) -> None:
    session = run(CONFLICTS.format(shift=shift), [torch.zeros(1)], smem=8192)
    assert session.stats.total["bank_conflicts"] == conflicts
    assert session.stats.total["shared_bytes"] == 128


def test_the_timeline_draws_loads_and_waits() -> None:
    source = torch.zeros(16, 24, dtype=torch.int32)
    session = run(
        COPY.format(column=0, row=0), [TensorMap(source, (8, 8)), torch.zeros(64)], grid=2, block=64
    )
    kinds = {e.kind for e in session.timeline.events}
    assert {"tma load", "wait", "phase"} <= kinds
    only = select(session.timeline.events, "(1, 0, 0)", ("tma load",))
    assert [e.actor for e in only] == ["CTA (1, 0, 0) TMA"]
    text = draw_text(session.timeline.events, width=60)
    assert "CTA (0, 0, 0) TMA" in text and "L" in text


def test_a_timeline_has_its_spans_in_place() -> None:
    events = [Event("a", "tma load", "", 0, 49), Event("b", "wgmma", "", 50, 99)]
    lines = draw_text(events, width=100).splitlines()
    assert lines[1] == "a " + "L" * 50 + " " * 50
    assert lines[2] == "b " + " " * 50 + "W" * 50


def test_the_plot_has_a_bar_for_each_event(tmp_path: object) -> None:
    pytest.importorskip("matplotlib")
    events = [Event("a", "tma load", "", 0, 49), Event("b", "wgmma", "", 50, 99)]
    path = f"{tmp_path}/t.png"
    figure = draw_plot(events, path)
    assert len(figure.axes[0].patches) == 2
    assert open(path, "rb").read(4) == b"\x89PNG"


def test_host_arguments_are_packed_as_c_does() -> None:
    layout = "!llvm.struct<(ptr<1>, struct<(struct<(i32, i32)>, struct<(i64)>)>)>"
    assert capture.pack(layout, [7, 1, 2, 3]) == struct.pack("<Qiiq", 7, 1, 2, 3)
    assert capture.pack("f32", [0.5]) == struct.pack("<f", 0.5)
    assert capture.pack("!llvm.struct<(i32, i64)>", [1, 2]) == struct.pack("<ixxxxq", 1, 2)
    with pytest.raises(ValueError, match="has 4 values; got 1"):
        capture.pack(layout, [7])


def test_labels_and_registers_of_inline_assembly_have_their_own_scope() -> None:
    module = ptx.parse(
        """.target sm_90a
.visible .entry k(.param .u64 p0, .param .align 8 .b8 p1[12], .param .u32 p2)
.reqntid 128, 2, 1
{
.reg .b32 %r<3>;
.loc 1 10 0
{
.reg .b32 t;
mov.b32 t, 1;
L: bra L;
}
{
.reg .b32 t;
mov.b32 t, %r1;
L: bra L;
}
}
.file 1 "/a/b.py"
"""
    )
    kernel = module.kernels["k"]
    first, loop, second, other = kernel.instructions
    assert first.operands[0] != second.operands[0]
    assert loop.label != other.label
    assert [(p.offset, p.size) for p in kernel.params] == [(0, 8), (8, 12), (20, 4)]
    assert kernel.max_threads == 256 and first.source[:2] == (1, 10) and module.files[1] == "/a/b.py"


def test_a_read_of_ptx_that_is_not_understood_names_its_line() -> None:
    with pytest.raises(emulator.EmulatorError, match="PTX line 4: cannot read"):
        ptx.parse(".target sm_90a\n.visible .entry k()\n{\nadd.u32 ?, ?;\n}\n")


def test_reports_are_raised_by_default() -> None:
    session = emulator.Session("sm_90a")
    module = ptx.parse(".target sm_90a\n.visible .entry k()\n{\ntrap;\n}\n")
    from lowering.emulator.memory import GlobalMemory
    from lowering.emulator.state import Launch

    with pytest.raises(emulator.EmulatorError, match="executed trap"):
        session.execute(module, Launch("k", (1, 1, 1), (32, 1, 1)), GlobalMemory())


def test_run_nests_and_checks_its_arch() -> None:
    assert emulator.active_arch() is None
    with emulator.run(arch="sm_90a") as outer:
        with emulator.run(arch="sm_80") as inner:
            assert emulator.active() is inner and emulator.active_arch() == "sm_80"
        assert emulator.active() is outer
    assert emulator.active() is None
    with pytest.raises(Exception, match="sm_12345"), emulator.run(arch="sm_12345"):
        pass


def test_stats_by_line_add_up() -> None:
    session = run(CONFLICTS.format(shift=2), [torch.zeros(1)], block=96)
    total = sum(counts["instructions"] for counts in session.stats.by_line.values())
    assert total == session.stats.total["instructions"] > 0
    assert session.stats.table("shared_bytes").split() == ["384", ":0"]
    assert np.isclose(session.stats.total["shared_bytes"], 3 * 128)


# Every CTA of a pair sends 4 bytes a lane to the other one, which counts them on its own barrier.
EXCHANGE = (
    """
@%p1 mbarrier.init.shared.b64 [%r3], 1;
@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r3], 128;
fence.mbarrier_init.release.cluster;
barrier.cluster.arrive.relaxed.aligned;
barrier.cluster.wait.acquire.aligned;
mov.u32 %r6, %cluster_ctarank;
xor.b32 %r7, %r6, 1;
add.u32 %r8, %r5, 128;
mapa.shared::cluster.u32 %r9, %r8, %r7;
mapa.shared::cluster.u32 %r12, %r3, %r7;
mad.lo.u32 %r10, %r6, 100, %r1;
st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r9], %r10, [%r12];
"""
    + wait()
    + """
ld.shared.b32 %r11, [%r5+128];
ld.param.u64 %rd1, [p0];
mov.u32 %r13, %ctaid.x;
mad.lo.u32 %r14, %r13, 128, %r4;
cvt.u64.u32 %rd2, %r14;
add.u64 %rd3, %rd1, %rd2;
st.global.b32 [%rd3], %r11;
"""
)


def test_stores_into_the_other_cta_arrive_with_their_bytes() -> None:
    for seed in range(4):
        target = torch.zeros(2, 32, dtype=torch.int32)
        session = run(EXCHANGE, [target], grid=2, cluster=2, seed=seed)
        assert target.tolist() == [list(range(100, 132)), list(range(32))]
        assert not session.reports


def test_a_store_into_the_other_cta_that_is_not_waited_for_is_found() -> None:
    target = torch.zeros(2, 32, dtype=torch.int32)
    kinds = set()
    for seed in range(4):
        session = run(EXCHANGE.replace(wait(), ""), [target], grid=2, cluster=2, seed=seed)
        assert session.reports
        kinds |= {r.kind for r in session.reports}
    assert emulator.Kind.READ_BEFORE_ARRIVAL in kinds


def test_a_launch_with_too_much_shared_memory_is_refused() -> None:
    with pytest.raises(emulator.EmulatorError, match="asks for 300000 bytes of shared memory; sm_90a has"):
        run("mov.b32 %r10, 1;", [torch.zeros(1)], smem=300_000)


def test_fields_of_a_tensor_map_are_replaced_one_by_one() -> None:
    tensor = torch.zeros(16, 24, dtype=torch.int32)
    raw = TensorMap(tensor, (8, 4), swizzle=1).encode()
    words = [int(x) for x in np.frombuffer(raw, np.uint64)]
    before = tma.decode_descriptor(np.array(words, np.uint64))
    fields = [
        ("global_address", 0, 0x12340),
        ("global_dim", 0, 4096),
        ("global_dim", 1, 7),
        ("global_stride", 0, (1 << 36) + 4096),
        ("box_dim", 1, 250),
        ("element_stride", 1, 3),
    ]
    for name, index, value in fields:
        tensormaps.edit(words, name, index, value)
    after = tma.decode_descriptor(np.array(words, np.uint64))
    assert (after.address, after.extents, after.box) == (0x12340, (4096, 7), (8, 250))
    assert (after.strides, after.element_strides) == ((4, (1 << 36) + 4096), (1, 3))
    assert (after.element, after.swizzle) == (before.element, before.swizzle)


def test_an_undefined_register_that_is_written_again_is_defined() -> None:
    store = "ld.param.u64 %rd1, [p0]; cvt.u64.u32 %rd2, %r4; add.u64 %rd3, %rd1, %rd2;"
    store += "st.global.b32 [%rd3], %r10;"
    target = torch.zeros(32, dtype=torch.int32)
    again = run("ld.shared.b32 %r10, [%r5]; activemask.b32 %r10;" + store, [target])
    assert not again.reports and (target == -1).all()
    kept = run("ld.shared.b32 %r10, [%r5]; @%p1 activemask.b32 %r10;" + store, [target])
    assert [r.kind for r in kept.reports] == [emulator.Kind.UNINITIALISED]
    assert kept.reports[0].lanes == "lanes " + ",".join(str(i) for i in range(1, 32))


@pytest.mark.parametrize(
    ("operand", "expected"),
    [("", 7), (", 0", 0), (", %p9", 0), (", %p10", 7)],
    ids=["all", "source size 0", "source ignored", "source not ignored"],
)
def test_cp_async_fills_with_zeros(operand: str, expected: int) -> None:
    body = f"""
setp.lt.u32 %p9, %r1, 99;
setp.gt.u32 %p10, %r1, 99;
ld.param.u64 %rd1, [p0];
cvt.u64.u32 %rd2, %r4;
add.u64 %rd3, %rd1, %rd2;
cp.async.ca.shared.global [%r5], [%rd3], 4{operand};
cp.async.wait_all;
ld.shared.b32 %r10, [%r5];
st.global.b32 [%rd3], %r10;
"""
    target = torch.full((32,), 7, dtype=torch.int32)
    assert not run(body, [target]).reports
    assert (target == expected).all()


def test_vector_registers_are_declared_and_named_by_element() -> None:
    target = torch.zeros(64, dtype=torch.int32)
    body = """
.reg .v2 .b32 %pair;
ld.param.u64 %rd1, [p0];
mul.wide.u32 %rd2, %r1, 8;
add.u64 %rd3, %rd1, %rd2;
mov.b32 %pair.x, %r1;
add.u32 %pair.y, %pair.x, 100;
st.global.v2.b32 [%rd3], %pair;
"""
    assert not run(body, [target]).reports
    assert target.tolist() == [x for lane in range(32) for x in (lane, lane + 100)]


@pytest.mark.parametrize(
    "body, place",
    [
        (".reg .b24 %odd;", r"PTX line \d+: .*: registers of an unknown type"),
        ("add.u32 %r10, %r11, [;", r"PTX line \d+: cannot read"),
        ("ld.global.b24 %r10, [%rd1];", r"kernel k, PTX line \d+, CTA \(0, 0, 0\) warp 0, at 'ld.global.b24"),
        ("st.shared.b32 [%r3], {};", r"kernel k, PTX line \d+, CTA \(0, 0, 0\) warp 0, at 'st.shared"),
        ("mbarrier.pending_count.b64 %r1, %rd1;", r"kernel k, PTX line \d+, CTA .* is not modelled"),
    ],
)
def test_every_failure_names_its_line(body: str, place: str) -> None:
    with pytest.raises(emulator.EmulatorError, match=place):
        run(body, [torch.zeros(1)])
