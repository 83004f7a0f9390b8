"""Trains `example_data/tiny_debate`, the small model that computes Collatz trails, objects to wrong steps and judges."""
