"""Engram: one frozen Vision Transformer, any number of tasks, one pass."""
