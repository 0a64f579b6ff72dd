"""Conversations of many people on one server, simulated over the policies that ragfuse keeps its
store by.
"""
