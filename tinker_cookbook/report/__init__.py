"""Reports on runs, from their folders alone: as one page, served live, and as figures."""
