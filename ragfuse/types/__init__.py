"""Values shared by all packages: keys, KV, prompts, plans, answers. Nothing here does I/O or makes
decisions.
"""
