"""Values that the whole of ragfuse shares: keys, KV, prompts, plans, answers. Nothing here does I/O or decides."""
