"""How what the project ships was made: ours to run again, not the user's."""
