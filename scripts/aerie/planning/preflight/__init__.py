"""What would stop or spoil a run, found in seconds and before any model is loaded."""
