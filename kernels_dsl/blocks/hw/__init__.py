"""The hardware: copies, matrix units, barriers, shared-memory layouts, and seams to the DSL."""
