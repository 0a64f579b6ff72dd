"""A store's entries, sessions and quotas, inspected and changed without loading a model."""
