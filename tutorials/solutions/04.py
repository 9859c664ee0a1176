"""Solution of exercise 4. Try it yourself first: tutorials/exercises/04.py has a checker."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "exercises"))
import checker


def empty_arrivals(warpgroups, share, elect):
    """Arrivals of one warpgroup, times those that read the stage."""
    return {"thread": 128, "warp": 4, "warpgroup": 1}[elect] * (warpgroups if share else 1)


if __name__ == "__main__":
    checker.main(__file__)
