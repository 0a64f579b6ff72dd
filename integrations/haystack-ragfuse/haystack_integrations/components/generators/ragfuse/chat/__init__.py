"""The chat generator, in the same module as in Haystack's own integrations."""
