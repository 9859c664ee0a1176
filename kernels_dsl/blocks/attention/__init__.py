"""Attention: masks, visits of key blocks, softmax, score tiles, order of query tiles."""
