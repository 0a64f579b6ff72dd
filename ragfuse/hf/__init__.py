"""The only home of transformers: loading, encoding, the probe, the fused prefill, and the hand-over
to `generate`.
"""
