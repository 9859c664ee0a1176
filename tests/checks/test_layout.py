"""The rules that say which operands a kernel family can read as they are."""

import pytest
import torch

from kernels_dsl.checks.layout import layout_of, padded_strides


def _layout(tensor: torch.Tensor):
    return layout_of(tensor.shape, tensor.stride(), tensor.storage_offset() * 2, 2)


def _bf16(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


def test_row_major_and_column_major() -> None:
    assert _layout(_bf16(64, 128)).contiguous == "row"
    assert _layout(_bf16(128, 64).t()).contiguous == "column"
    assert _layout(_bf16(3, 64, 128)).contiguous == "row"
    assert _layout(_bf16(3, 128, 64).mT).contiguous == "column"


@pytest.mark.parametrize(
    ("tensor", "align"),
    [
        (_bf16(64, 128), 16),
        (_bf16(64, 132), 8),
        (_bf16(64, 130), 4),
        (_bf16(64, 129), 2),
        (_bf16(64, 256)[:, 8:136], 16),
        (_bf16(64, 256)[:, 4:132], 8),
        (_bf16(64, 256)[:, 1:129], 2),
        (_bf16(3, 65, 8)[:, :64], 16),
        (_bf16(1, 129), 16),
    ],
)
def test_alignment_is_that_of_every_row(tensor: torch.Tensor, align: int) -> None:
    assert _layout(tensor).align == align


def test_no_contiguous_mode() -> None:
    assert _layout(_bf16(64, 128)[:, ::2]).contiguous is None
    assert _layout(_bf16(1, 128).expand(64, 128)).contiguous is None
    assert _layout(_bf16(64, 1).expand(64, 128)).contiguous is None


def test_broadcast_batch_is_no_obstacle() -> None:
    layout = _layout(_bf16(64, 128).expand(5, 64, 128))
    assert (layout.contiguous, layout.align, layout.strides) == ("row", 16, None)


def test_strides_of_size_one_modes_are_replaced_where_unsuitable() -> None:
    row = _bf16(1, 129)
    layout = _layout(row)
    assert layout.contiguous == "row"
    assert layout.strides is not None and layout.strides[1] == 1 and layout.strides[0] % 8 == 0
    assert _layout(_bf16(1, 128)).strides is None  # a stride of 128 elements is as good as any
    column = _layout(_bf16(129, 1))
    assert column.contiguous == "column"
    assert column.strides is not None and column.strides[0] == 1 and column.strides[1] % 8 == 0
    strided = _layout(_bf16(129, 2)[:, :1])  # a column with a stride of 2 elements
    assert strided.contiguous == "row" and strided.align == 4


def test_a_matrix_view_with_replaced_strides_sees_the_same_elements() -> None:
    for tensor in (
        _bf16(1, 129),
        _bf16(129, 1),
        _bf16(1, 1),
        _bf16(1, 7, 1),
        _bf16(1, 1, 7),
        _bf16(9, 2)[:, :1],
    ):
        tensor.copy_(torch.randn(tensor.shape))
        layout = _layout(tensor)
        if layout.strides is not None:
            view = tensor.as_strided(tensor.shape, layout.strides)
            assert torch.equal(view, tensor)


@pytest.mark.parametrize("shape", [(5, 7), (3, 5, 7), (1, 1), (2, 1, 9)])
@pytest.mark.parametrize("contiguous", ["row", "column"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_padded_copy_is_always_readable(shape, contiguous: str, dtype: torch.dtype) -> None:
    size = torch.empty((), dtype=dtype).element_size()
    buffer = torch.empty_strided(shape, padded_strides(shape, contiguous, size), dtype=dtype)
    buffer.copy_(torch.randn(shape))
    layout = layout_of(buffer.shape, buffer.stride(), 0, size)
    assert layout.align == 16
    assert layout.contiguous is not None
    if min(shape[-2:]) > 1:
        assert layout.contiguous == contiguous
