"""A frozen base model and the adapters on it: its passes, in plain torch."""
