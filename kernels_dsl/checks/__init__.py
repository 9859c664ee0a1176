"""Checks of arguments that know no operation: plain tensors, options, functions, memory that overlaps."""
