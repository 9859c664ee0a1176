"""Solution of exercise 11. Try it yourself first: tutorials/exercises/11.py has a checker."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "exercises"))
import checker


def visit(a, b, n, window, sink):
    """The blocks of the sink that row b reaches, and those of the window; a block may be of both."""
    sink_blocks = range(-(-min(sink, b + 1) // n))
    window_blocks = range(max(a - window + 1, 0) // n, b // n + 1)
    found = []
    for block in sorted({*sink_blocks, *window_blocks}):
        first, last = block * n, block * n + n - 1
        # Every row sees the last key, and every row sees the first ones: in the window of row b, or the sink.
        hidden = range(max(first, sink), min(last, b - window) + 1)  # neither sink nor window of row b
        found.append((block, last <= a and len(hidden) == 0))
    return found


if __name__ == "__main__":
    checker.main(__file__)
