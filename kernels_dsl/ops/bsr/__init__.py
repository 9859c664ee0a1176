"""Block-sparse products: patterns, plans, operators, in 16 and 8 bits."""
