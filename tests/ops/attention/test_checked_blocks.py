"""Blocks of `checked` that overlap: each ends on its own."""

from __future__ import annotations

import pytest

from kernels_dsl.ops.checked import checked, is_checked


def test_blocks_that_end_in_another_order_than_they_began():
    before = is_checked()
    first, second = checked(), checked(False)
    with first:
        assert is_checked()
        second.__enter__()
        assert not is_checked()
    assert not is_checked()  # the second goes on
    second.__exit__(None, None, None)
    assert is_checked() == before


def test_a_block_that_raises_ends_too():
    before = is_checked()
    with pytest.raises(KeyError), checked(not before):
        raise KeyError
    assert is_checked() == before
