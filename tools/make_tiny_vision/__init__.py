"""Makes the tiny model that sees."""
