"""Process-wide state: background threads, bounded mappings, and objects that engines share."""
