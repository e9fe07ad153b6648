"""Decides and records the grades of a class. Never visible to a submission."""
