"""Kernel configurations, candidate tables and budgets. Imports neither the compiler nor torch."""
