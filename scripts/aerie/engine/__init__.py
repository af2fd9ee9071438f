"""What runs the verifier: vLLM in this process, or servers that already run."""
