"""How much one server does, and how many it takes: costs measured here, and arithmetic on them.

costs      what things cost on one machine, as a file
measuring  measures them; passes, many_tasks: batches, and a store of many tasks
sizing     requests a second, replicas, memory, the store, what breaks first
report     the tables
"""
