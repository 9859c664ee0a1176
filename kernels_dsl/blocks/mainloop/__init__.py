"""Main loops: operands through shared memory into the matrix units, sums of one or two levels."""
