"""The verifier's checkpoint: import, fingerprint, fit with the configuration."""
