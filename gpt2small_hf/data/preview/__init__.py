"""Rows of a dataset as text or HTML."""
