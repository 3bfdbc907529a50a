"""Closed-form heads (LDA, ridge, text) and out-of-distribution detection, from features alone."""
