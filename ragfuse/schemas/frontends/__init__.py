"""Front ends that convert Python functions and other frameworks' templates to schemas."""
