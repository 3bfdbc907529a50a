"""Safe changes: compare versions on live traffic, score feedback, promote, roll back."""
