"""Arrive counts of mbarriers, computed from who arrives. A wrong count is a hang, so nothing is typed in."""


def multicast_release_count(consumer_warps: int, cluster: tuple[int, int]) -> int:
    """Arrivals that empty one stage of one CTA.

    A stage is written by the CTAs of the same cluster row (they share A) and of the same cluster
    column (they share B). So each of those CTAs' consumer warps must say that it has read its own
    copy before anybody overwrites it: one elected arrival a warp and a CTA of the row or column.
    """
    if consumer_warps < 1:
        raise ValueError(f"consumer_warps must be at least 1; it is {consumer_warps}")
    rows, columns = cluster
    return consumer_warps * (rows + columns - 1)
