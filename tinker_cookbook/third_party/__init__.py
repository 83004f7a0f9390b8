"""Support for the formats of other programs."""
