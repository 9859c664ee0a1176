"""`attention` in 16 and 8 bits: checks, block lists, plans, operators, and the hooks of other libraries."""
