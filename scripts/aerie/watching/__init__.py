"""Following jobs and runs: supervisor, log triage, status, notifications."""
