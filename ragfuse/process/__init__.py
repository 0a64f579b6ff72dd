"""Process-wide tools: locks and caches that survive a fork, background threads, and objects that engines share."""
