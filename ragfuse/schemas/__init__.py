"""Prompt Cache: schemas and prompts in PML, token layouts, and schemas from Python functions."""
