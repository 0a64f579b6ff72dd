"""Prompt Cache: schemas and prompts in PML, their layout, and front ends that write them."""
