"""Hidden states: conventions, shards, checks, the store."""
