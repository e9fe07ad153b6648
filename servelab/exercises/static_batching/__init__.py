"""Unit 02, static batching."""
