"""Whole servers beside each other: vLLM, ragfuse, and ragfuse with its answers decoded by vLLM."""
