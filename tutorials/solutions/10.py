"""Solution of exercise 10. Try it yourself first: tutorials/exercises/10.py has a checker."""

import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "exercises"))
import checker


def merge(first, second):
    """Both are brought to the larger maximum; without any key there is none, and nothing to correct."""
    m = max(first[0], second[0])
    if m == -math.inf:
        return first
    factors = [math.exp(part[0] - m) for part in (first, second)]
    total = sum(factor * part[1] for factor, part in zip(factors, (first, second)))
    return m, total, [factors[0] * x + factors[1] * y for x, y in zip(first[2], second[2])]


if __name__ == "__main__":
    checker.main(__file__)
