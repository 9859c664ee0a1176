"""The tables that `traffic.py` makes of Nsight Compute's CSV."""

from __future__ import annotations

import pytest

CSV = """==PROF== Connected to process 1
"ID","Process ID","Process Name","Kernel Name","Metric Name","Metric Unit","Metric Value"
"1","7","python","kernel_b","dram__bytes_read.sum","byte","402,653,184"
"0","7","python","kernel_a","dram__bytes_read.sum","byte","134217728"
"0","7","python","kernel_a","dram__bytes_write.sum","byte","1,000,000,000"
"0","7","python","kernel_a","lts__t_sector_hit_rate.pct","%","71.6"
"0","7","python","kernel_a","lts__t_sectors_op_read.sum","sector","62,500,000"
"""


def test_kernels_in_the_order_in_which_they_ran():
    import traffic

    first, second = traffic.parse(CSV, 2)
    assert second == {traffic.READ: 402653184.0}
    assert traffic.row(first, 2**26) == ["72 %", "2.00", "0.13", "2.0", "1.00"]


def test_one_kernel_too_many():
    """A row's call is known by its number alone."""
    import traffic

    with pytest.raises(ValueError, match=r"3 kernels .* saw 2: .*kernel_b"):
        traffic.parse(CSV, 3)


def test_no_permission():
    import traffic

    with pytest.raises(ValueError, match="saw 0"):
        traffic.parse("==ERROR== ERR_NVGPUCTRPERM - no permission to access GPU Performance Counters", 1)


def test_calls_are_the_measured_ones(monkeypatch):
    """The names that rows get are those of step 8's calls, in their order."""
    import common
    import torch
    import traffic

    step8 = common.load("08_gemm_persistent")
    empty = (torch.empty(0, 0),) * 3
    monkeypatch.setattr(step8.step6, "problem", lambda m, n, k: empty)
    names = [(shape, name) for shape in step8.SHAPES for name in step8.variants(*shape)]
    assert traffic.expected() == names


def test_table():
    import traffic

    table = {"title": "8³", "rows": {"step 7": ["72 %", "2.00", "0.13", "2.0", "1.00"]}}
    *_, head, rule, row = traffic.lines(table)
    assert head.count("|") == rule.count("|") == row.count("|") == len(traffic.COLUMNS) + 2
