"""Sockets: connection limits, header limits, trusted proxies."""
