"""A frozen base model and its adapters: forward and backward passes in plain torch."""
