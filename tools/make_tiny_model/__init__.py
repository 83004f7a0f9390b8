"""Trains `example_data/tiny_chat`, the small chat model that every test and demo of this repository runs on."""
