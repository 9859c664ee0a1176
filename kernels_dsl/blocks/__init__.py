"""Building blocks of the kernels: the only place that touches raw instructions."""
