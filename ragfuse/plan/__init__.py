"""Decisions about loading, computing and eviction, as pure functions: no torch, clock or I/O."""
