"""Exercise 8: a walk in snake order.

Step 8's walk ends a group at the last column and begins the next group at the first one, whose part of B may
have left L2 by then. Change it: every second group walks the columns from right to left.

    group = 2, 4 x 4 tiles       0  2  4  6
                                 1  3  5  7
                                14 12 10  8
                                15 13 11  9
"""

import checker


def tile_at(index: int, grid: tuple[int, int], group: int) -> tuple[int, int]:
    """(row, column) of position `index` of the walk over `grid` = (rows, columns); plain Python integers."""
    raise NotImplementedError


def check(answers) -> None:
    """Each tile once; down within a column; from group to group in the same column."""
    for grid, group in (((4, 4), 2), ((5, 3), 2), ((7, 4), 3), ((3, 5), 8), ((6, 2), 1)):
        rows, columns = grid
        walk = [tuple(answers.tile_at(i, grid, group)) for i in range(rows * columns)]
        where = f"{rows} x {columns} tiles, group {group}"
        for i, (row, column) in enumerate(walk):
            checker.expect(
                0 <= row < rows and 0 <= column < columns,
                f"{where}: position {i} is tile {(row, column)}, outside",
            )
        twice = next((tile for tile in walk if walk.count(tile) > 1), None)
        checker.expect(twice is None, f"{where}: tile {twice} is visited more than once")
        for i in range(1, len(walk)):
            (row0, column0), (row1, column1) = walk[i - 1], walk[i]
            if row0 // group != row1 // group:
                checker.expect(
                    column0 == column1,
                    f"{where}: from {walk[i - 1]} to {walk[i]} group and column change: stay in the column",
                )
                checker.expect(
                    row1 == row0 // group * group + group, f"{where}: {walk[i]} does not begin its group"
                )
            elif column0 == column1:
                checker.expect(row1 == row0 + 1, f"{where}: {walk[i - 1]} to {walk[i]}: go down row by row")
            else:
                forward = 1 if row0 // group % 2 == 0 else -1
                checker.expect(
                    column1 == column0 + forward and row1 == row0 // group * group,
                    f"{where}: {walk[i - 1]} to {walk[i]}: the next column begins at the group's first row, "
                    f"{'right' if forward == 1 else 'left'} of this one",
                )


if __name__ == "__main__":
    checker.main(__file__)
