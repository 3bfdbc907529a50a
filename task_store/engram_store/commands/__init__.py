"""The `engram tasks` commands that work on a store: gc, verify, backup, restore-backup."""
