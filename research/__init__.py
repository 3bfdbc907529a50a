"""How what ships with Engram was made, and what was measured: ours to run, not the users'."""
