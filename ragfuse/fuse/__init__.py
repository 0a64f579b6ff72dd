"""The numerics of a fused prefill: key rotation, row selection, attention and the order of the
steps.

This package depends on torch only; it knows no model family, no store and no file.
"""
