"""Each peer as a user would write it, run in an environment of its own: these import no Engram."""
