"""Chat templates: rendering with the source of every character, loss masks, encoding."""
