"""Supervision of long jobs, log triage, status of a run, notifications."""
