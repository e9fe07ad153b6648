"""Unit 03, paged KV."""
