"""The servers that people run, beside ours: T classifiers over HTTP, in one run.

    python -m benchmarks.peers [--quick]

environments  a virtual environment for each peer, made here
prepared      the network, the tasks and the converted models that all of them serve
servers/      each peer as a small program
load          the load generator, a process of its own
contenders    the servers compared, and the request format of each
measuring     phases that take turns
report        the tables and the picture
"""
