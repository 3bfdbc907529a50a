"""The `engram` commands that need the server: serve, keys, audit, backbone, zero-shot."""
