"""What runs did, from their folders alone: as one page, served while they go on, and as figures."""
