"""gRPC: the Open Inference Protocol, health checks and reflection. Requires the extra `grpc`.

services.py   the methods, which call what `/v2` calls
calls.py      one call: authentication, limits, errors, logs and metrics as over HTTP
messages.py   messages to the schemas of `/v2` and back
wire.py       payloads of a message without copying them
protocol.py   message classes, from the compiled .proto file
server.py     listening, TLS, and the limits that gRPC enforces itself

docs/reference/open-inference.md documents it.
"""
