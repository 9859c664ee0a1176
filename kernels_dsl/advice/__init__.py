"""Advice on which call, format and density is the fastest for a product, as measured."""
