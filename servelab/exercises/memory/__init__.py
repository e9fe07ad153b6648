"""Unit 01, memory: the serving ledger."""
