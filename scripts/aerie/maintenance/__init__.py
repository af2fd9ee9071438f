"""Maintenance of the store of hidden states: list, verify, collect garbage, import, export."""
