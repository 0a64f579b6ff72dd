"""Front ends that convert Python functions to schemas."""
