"""Conversations from files and data sets to token ids and loss masks."""
