"""Solution of exercise A1. Try it yourself first: tutorials/exercises/a1.py has a checker."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "exercises"))
import checker


def under_way(k, k_tiles, stages):
    """stages - 2 newer tiles, or as many as there are left."""
    return min(stages - 2, k_tiles - 1 - k)


if __name__ == "__main__":
    checker.main(__file__)
