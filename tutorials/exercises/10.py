"""Exercise 10: two halves of the keys, one result.

A query sees many keys. One kernel takes half of them, another one the other half, and each hands over what
step 10 keeps for a row: the largest score m, the sum l of exp(s - m), and the unnormalised output o, the sum
of exp(s - m) v. `merge` makes (m, l, o) of all keys from two such triples, as exactly as if one kernel had
seen them all. This is what FlashDecoding does for one query and a long cache.

    merge((m1, l1, o1), (m2, l2, o2)) -> (m, l, o)        m, l: float, o: list of floats

Mind the half without any key: m is -inf, l is 0 and o is zeros. Mind scores of 1000: exp overflows at 710.
"""

import math
import random

import checker


def merge(first: tuple, second: tuple) -> tuple:
    """The triple of both halves."""
    raise NotImplementedError


def triple(scores: list, values: list, dim: int) -> tuple:
    """(m, l, o) of some keys, by definition."""
    m = max(scores, default=-math.inf)
    weights = [math.exp(s - m) for s in scores]
    return m, sum(weights), [sum(w * v[d] for w, v in zip(weights, values)) for d in range(dim)]


def close(found: float, expected: float) -> bool:
    return found == expected or math.isclose(found, expected, rel_tol=1e-9, abs_tol=1e-12)


def check(answers) -> None:
    """Random halves, large scores, empty halves, and three parts in either order."""
    draw = random.Random(10)
    for name, sizes, shift in (
        ("5 and 9 keys", (5, 9), 0.0),
        ("scores near 1000", (6, 6), 1000.0),
        ("scores near -1000", (6, 6), -1000.0),
        ("no key in the second half", (4, 0), 0.0),
        ("no key in the first half", (0, 4), 0.0),
        ("no key at all", (0, 0), 0.0),
    ):
        scores = [shift + draw.gauss(0, 3) for _ in range(sum(sizes))]
        values = [[draw.gauss(0, 1) for _ in range(3)] for _ in scores]
        cut = sizes[0]
        halves = triple(scores[:cut], values[:cut], 3), triple(scores[cut:], values[cut:], 3)
        try:
            m, l, o = answers.merge(*halves)
        except (OverflowError, ValueError, ZeroDivisionError) as error:
            raise checker.Wrong(f"{name}: {type(error).__name__}: {error}") from error
        expected = triple(scores, values, 3)
        checker.expect(close(m, expected[0]), f"{name}: m is {m}, should be {expected[0]}")
        checker.expect(close(l, expected[1]), f"{name}: l is {l}, should be {expected[1]}")
        checker.expect(
            len(o) == 3 and all(map(close, o, expected[2])), f"{name}: o is {o}, should be {expected[2]}"
        )


if __name__ == "__main__":
    checker.main(__file__)
