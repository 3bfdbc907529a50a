"""How what ships with Engram was made: run by hand, needed by nobody who serves or trains."""
