"""Unit 05: collectives out of sends and receives, and what they cost."""
