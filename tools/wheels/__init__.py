"""Wheels for a machine without a network: what the project needs beyond what is there, downloaded here, installed there.

Needs pip and the standard library alone, because nothing else is sure to be installed on either machine.
"""
