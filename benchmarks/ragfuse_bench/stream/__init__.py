"""How often a question is late whose KV comes over a changing line: text, 8 bits, one level, and
levels by deadline.
"""
