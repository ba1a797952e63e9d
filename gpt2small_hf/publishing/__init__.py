"""A run to a repository on the Hub: stage, verify, send."""
