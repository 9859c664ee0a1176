"""Solution of exercise 12. Try it yourself first: tutorials/exercises/12.py has a checker."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "exercises"))
import checker


def transposed(first, columns, count):
    """Entries are stored row by row, so a stable sort by column leaves the rows ascending."""
    import torch

    entries = torch.argsort(columns, stable=True)
    numbers = torch.arange(len(first) - 1, dtype=torch.int32, device=first.device)
    row_of = torch.repeat_interleave(numbers, first.diff(), output_size=len(columns))
    bounds = torch.arange(count + 1, dtype=torch.int32, device=columns.device)
    first_t = torch.searchsorted(columns[entries], bounds, out_int32=True)
    return first_t, row_of[entries], entries.int()


if __name__ == "__main__":
    checker.main(__file__)
