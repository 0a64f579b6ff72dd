"""Process-wide tools: background threads, bounded mappings, and objects that engines share."""
