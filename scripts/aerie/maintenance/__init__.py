"""Care of the store of hidden states: verify, collect garbage, import, export."""
