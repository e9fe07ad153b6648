"""Unit 04, continuous batching."""
