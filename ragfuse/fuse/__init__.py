"""The numerics of a fused prefill: key rotation, row selection, attention, and their order.

Depends on torch only: no model family, no store, no file.
"""
