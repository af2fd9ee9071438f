"""Lanes: hidden states of samples that the store lacks."""
