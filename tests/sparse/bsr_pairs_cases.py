"""Patterns of blocks for lists in pairs, and the same lists made by plain Python."""

from __future__ import annotations

import torch

from kernels_dsl.config.bsr import SECOND, SHARED
from kernels_dsl.sparse import lists as maker
from kernels_dsl.sparse.pattern import Lists, Pattern

Rows = list[list[int]]


def pattern_of_rows(rows: Rows, columns: int, device: str = "cpu") -> Pattern:
    """The pattern whose rows keep these columns, in this order."""
    crow = torch.tensor([0, *(len(row) for row in rows)]).cumsum(0, dtype=torch.int32)
    col = torch.tensor([column for row in rows for column in row], dtype=torch.int32)
    return Pattern(crow.to(device), col.to(device), len(rows), columns)


def random_rows(kind: str, count: int, columns: int, seed: int) -> Rows:
    """Rows of a kind, `uniform` where nothing else is known of it."""
    generator = torch.Generator().manual_seed(seed)

    def some(length: int) -> list[int]:
        return sorted(torch.randperm(columns, generator=generator)[:length].tolist())

    if kind == "power law":
        return [some(int(columns / (1 + (7 * r) % count))) for r in range(count)]
    if kind == "twins":
        half = [some(columns // 3) for _ in range(-(-count // 2))]
        return (half + half[::-1])[:count]
    if kind == "alike":
        base = some(2 * columns // 3)
        lengths = [len(base) // 4 + r % 4 if r % 3 else len(base) - 7 * r % count for r in range(count)]
        return [sorted({*base[:n], *some(3)}) for n in lengths]
    if kind == "disjoint":
        return [[c for c in range(columns) if c % count == r] for r in range(count)]
    if kind == "full":
        return [list(range(columns)) for _ in range(count)]
    if kind == "all empty":
        return [[] for _ in range(count)]
    rows = [some(columns // 4) for _ in range(count)]
    if kind == "empty ones":
        rows[::3] = [[] for _ in rows[::3]]
    if kind == "duplicates":
        rows = [sorted(row + row[r % 2 :: 2] + row[:1]) for r, row in enumerate(rows)]
    if kind == "unsorted":
        rows = [[row[i] for i in torch.randperm(len(row), generator=generator).tolist()] for row in rows]
    return rows


def greedy_pairs(rows: Rows) -> list[tuple[int, int]]:
    """Pairs (longer, other) of the greedy matching, and (list, list) of one alone; the longest first."""
    order = sorted(range(len(rows)), key=lambda r: -len(rows[r]))
    pairs, rule = [], maker.RULE
    for base in range(0, len(rows), rule.group):
        group = order[base : base + rule.group]
        kept = torch.zeros(len(group), 1 + max((c for row in rows for c in row), default=0))
        for i, r in enumerate(group):
            kept[i, rows[r]] = 1
        lengths = torch.tensor([len(rows[r]) for r in group])
        weight = rule.gain * (kept @ kept.T) - rule.cost * (lengths[:, None] - lengths).abs()
        upper, lower = torch.nonzero((weight >= 0).triu(1)).T
        ranks = -weight[upper, lower], upper ^ lower, upper, lower
        mates = list(range(len(group)))
        for _, _, i, j in sorted(zip(*(rank.tolist() for rank in ranks))):
            if mates[i] == i and mates[j] == j:
                mates[i], mates[j] = j, i
        pairs += [(group[i], group[j]) for i, j in enumerate(mates) if i <= j]
    return pairs


def lines_of(rows: Rows, first: list[int], pairs: list[tuple[int, int]]) -> tuple[int, list[list[int]]]:
    """The numbers of heavy lines and of all lines."""
    firsts, seconds = [], []
    for i, j in pairs:
        line = [min(i, j) | max(i, j) << 15, first[i], first[i + 1], 0]
        firsts.append(line)
        seconds += [[line[0] | SECOND, *line[1:]]] if i != j else []
    mean = sum(end - begin for _, begin, end, _ in firsts + seconds) / len(rows)
    heavy = [line for line in firsts + seconds if line[2] - line[1] > 1.5 * mean]
    heavy.sort(key=lambda line: firsts.index([line[0] & ~SECOND, *line[1:]]))
    rest = [line for line in firsts + seconds if line not in heavy]
    return len(heavy), heavy + rest


def steps_of(rows: Rows, first: list[int], columns: int, pair: tuple[int, int]) -> list[tuple[int, ...]]:
    """Steps (dense of the longer, the other, kept of the longer, the other) of a pair or of a list alone."""
    i, j = pair
    mine = [(c, first[i] + e) for e, c in enumerate(rows[i])]
    if i == j:
        return [(c, columns, e, first[-1]) for c, e in mine]
    theirs = [(c, first[j] + e) for e, c in enumerate(rows[j])]
    both = set(rows[i]) & set(rows[j])
    shared: dict[int, int] = {}
    for c, e in theirs:
        if c in both:
            shared.setdefault(c, e)
    rest = [(c, e) for c, e in theirs if shared.get(c) != e]
    seen, steps = set(), []
    for c, e in mine:
        if c in both and c not in seen:
            seen.add(c)
            steps.append((c + SHARED, c + SHARED, e, shared[c]))
        else:
            other = rest.pop(0) if rest else (columns, first[-1])
            steps.append((c, other[0], e, other[1]))
    assert not rest
    return steps


def check(rows: Rows, columns: int, lists: Lists) -> torch.Tensor:
    """Compares the packed pairs of `rows` with plain Python's; returns them."""
    packed = lists.in_pairs
    first, nnz, count = lists.first.tolist(), max(1, sum(map(len, rows))), len(rows)
    words = packed.tolist()
    assert len(words) == 4 + 4 * count + 4 * nnz
    wanted = greedy_pairs(rows)
    heavy, lines = lines_of(rows, first, wanted)
    assert words[:4] == [heavy, 0, 0, 0]
    assert [words[4 + 4 * p : 8 + 4 * p] for p in range(count)] == lines
    vectors = [words[4 + 4 * count + v * nnz :][:nnz] for v in range(4)]
    for i, j in wanted:
        at, turned = slice(first[i], first[i + 1]), [1, 0, 3, 2] if i > j else [0, 1, 2, 3]
        assert list(zip(*(vectors[v][at] for v in turned))) == steps_of(rows, first, columns, (i, j)), (i, j)
        if i != j:
            gap = slice(first[j], first[j + 1])
            for vector, filler in zip(vectors, (columns, columns, nnz, nnz)):
                assert set(vector[gap]) <= {filler}
    return packed
