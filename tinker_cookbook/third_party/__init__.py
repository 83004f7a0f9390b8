"""What other programs' formats need."""
