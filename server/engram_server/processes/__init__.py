"""Several server processes that share a port: the supervisor, its children and their metrics.

`engram serve --processes N` becomes the supervisor, which starts N servers and imports nothing
heavy. Each of them is a complete replica with its own copy of the backbone.
"""
