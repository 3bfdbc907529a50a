"""Metrics, traces, logs and the audit log."""
