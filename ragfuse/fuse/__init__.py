"""The numerics of a fused prefill: key rotation, row selection, attention, and KV buffers.

Depends on torch and NumPy only: no model family, no store, no file.
"""
