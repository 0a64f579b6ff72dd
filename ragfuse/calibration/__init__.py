"""The laboratory of `ragfuse calibrate`: methods, their distance to full prefill, and which of them is safe."""
