"""Python functions and templates of other frameworks, converted to schemas."""
