"""Unit 06, tensor parallelism."""
