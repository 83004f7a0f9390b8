"""From requests to tokens: which prompts are computed when, what the KV cache holds, and which token is drawn."""
