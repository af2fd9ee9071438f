"""Measuring a drafter served by vLLM: acceptance and speed."""
