"""Sampling: scheduling, prefill, decoding, pages of the KV cache, and the choice of tokens."""
