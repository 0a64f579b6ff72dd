"""The chat generator, in the module that Haystack's own integrations have it in."""
