"""The servers that people run, beside ours: T classifiers over HTTP, in one run.

    python -m benchmarks.peers [--quick]

environments  a virtual environment for each peer, made here
prepared      the network, the tasks and the converted models that all of them serve
servers/      each peer as a small program
load          the load generator, a process of its own
contenders    who takes part, and how each is asked
measuring     phases that take turns
report        the tables and the picture
"""
