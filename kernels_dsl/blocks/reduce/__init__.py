"""Sums and maxima that several CTAs share."""
