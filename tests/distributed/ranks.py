"""Ranks of a gloo group as processes that one parent forks, after it has compiled what they run."""
