"""Wheels for a machine without a network: downloads missing requirements here, and installs them there.

Needs only pip and the standard library, because nothing else is sure to be installed on either machine.
"""
