"""Exercise 12: the transposed pattern, without a wait for the GPU.

The gradient of B in D = A @ B needs A transposed @ dD, whose lists are those of A's block *columns*: for each
block column its kept blocks, rows ascending, and for each of them where its values lie. Make them from step
12's lists with torch operations alone:

    transposed(first, columns, count) -> (first_t, rows, entries), int32

first (rows + 1), columns (entries): step 12's; `count`: number of block columns. Block column c keeps the
entries first_t[c] ... first_t[c + 1] - 1 of `rows` (the block row, ascending) and of `entries` (the number of
the block among the values). Columns within a row may come in any order. Nothing may ask the GPU for a number
(no .item(), .tolist(), int(), nonzero() or repeat_interleave without output_size): the checker counts.
"""

import checker


def transposed(first, columns, count):
    """Lists by block column."""
    raise NotImplementedError


def _forbidden(torch):
    """Records calls that would wait for the GPU."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.found: list[str] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            name = func.name()
            waits = name in ("aten::_local_scalar_dense", "aten::nonzero")
            if waits or (name.startswith("aten::repeat_interleave") and kwargs.get("output_size") is None):
                self.found.append(name)
            return func(*args, **kwargs)

    return Watch()


def check(answers) -> None:
    """Against a walk over all entries in plain Python."""
    import torch

    generator = torch.Generator().manual_seed(12)
    for rows, count, density in ((3, 4, 0.5), (7, 5, 0.3), (1, 6, 0.9), (6, 1, 0.5), (9, 9, 0.1)):
        mask = torch.rand(rows, count, generator=generator) < density
        mask[0, 0] = True
        lengths = mask.sum(1)
        first = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
        parts = [row.nonzero()[:, 0][torch.randperm(int(row.sum()), generator=generator)] for row in mask]
        columns = torch.cat(parts).int()
        where = f"{rows} x {count} blocks of which {int(mask.sum())} are kept"
        watch = _forbidden(torch)
        with watch:
            found = answers.transposed(first, columns, count)
        checker.expect(not watch.found, f"{where}: {watch.found[:1]} waits for the GPU")
        checker.expect(
            all(x.dtype == torch.int32 for x in found), f"{where}: {[x.dtype for x in found]}, not int32"
        )
        first_t, row_of, entries = (x.tolist() for x in found)
        kept = sorted(
            (int(columns[e]), r, e) for r in range(rows) for e in range(int(first[r]), int(first[r + 1]))
        )
        ends = [sum(c < column for c, _, _ in kept) for column in range(count + 1)]
        checker.expect(first_t == ends, f"{where}: first_t is {first_t}, must be {ends}")
        checker.expect(row_of == [r for _, r, _ in kept], f"{where}: rows is {row_of}, rows must ascend")
        checker.expect(
            entries == [e for _, _, e in kept], f"{where}: entries is {entries}: not where the values lie"
        )


if __name__ == "__main__":
    checker.main(__file__)
