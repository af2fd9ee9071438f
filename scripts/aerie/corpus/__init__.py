"""Prompts and conversations: reading files, layouts, cleaning."""
