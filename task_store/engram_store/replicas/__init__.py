"""What each server writes for all others: its heartbeat, and its evidence about versions."""
