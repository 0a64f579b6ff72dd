"""Conversations whose KV is stored between turns (AttentionStore)."""
