"""Checks of arguments that know no operation: plain tensors, options, functions, layouts, overlaps."""
