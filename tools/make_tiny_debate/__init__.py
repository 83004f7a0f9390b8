"""Trains `example_data/tiny_debate`, the small model that follows trails, objects to wrong steps and judges."""
