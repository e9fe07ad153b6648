"""Unit 11, the capstone."""
