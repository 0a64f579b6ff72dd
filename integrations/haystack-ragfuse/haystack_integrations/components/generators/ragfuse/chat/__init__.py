"""The package of the chat generator, named as in Haystack's own integrations."""
