"""The routes, by what they are about: each parses, calls and formats."""
