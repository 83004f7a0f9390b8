"""Recipes, loops and data for post-training language models, on the hosted Tinker service or on the local engine."""
