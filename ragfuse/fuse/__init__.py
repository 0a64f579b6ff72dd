"""The numeric heart: rotation, selection, attention and the steps of one fused prefill.

Torch only. Nothing here knows a model family, a store or a file.
"""
