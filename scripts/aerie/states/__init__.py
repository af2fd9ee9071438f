"""Hidden states: conventions, shard format, checks, store."""
