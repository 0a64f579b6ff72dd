"""Prompt Cache: schemas and prompts in PML, their token layout, and front ends that create them."""
