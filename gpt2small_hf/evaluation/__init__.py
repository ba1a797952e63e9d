"""How a model becomes results on disk."""
