"""The verifier's answers, and prompts that it writes itself."""
