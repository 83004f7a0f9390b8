"""A terminal chat, at tinker-cookbook's path."""
