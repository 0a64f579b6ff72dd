"""Conversations whose KV is kept between turns (AttentionStore)."""
