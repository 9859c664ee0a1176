"""Formats of sparse things, below the operations: block-sparse matrices, patterns, lists of blocks, masks."""
