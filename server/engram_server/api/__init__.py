"""The HTTP API: bodies in, answers and problems out. No torch, no model."""
