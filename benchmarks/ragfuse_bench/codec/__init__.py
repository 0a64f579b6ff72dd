"""What a codec of KV is worth, measured on real text: sizes, fidelity, answers, speed, and
CacheGen's own figures.
"""
