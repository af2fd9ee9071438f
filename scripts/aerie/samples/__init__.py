"""Tokenized samples and vocabulary maps."""
