"""What a run takes, and what is checked before it starts."""
