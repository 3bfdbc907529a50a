"""How much one server does, and how many it takes: costs measured here, a fleet simulated on them.

costs      what things cost on one machine, as a file
measuring  measures them
traffic    who asks for what
fleet      simulates replicas event by event, on those costs
validation the simulation beside the real engine
sizing     the questions: requests a second, replicas, caches, the store, what breaks first
report     the tables
"""
