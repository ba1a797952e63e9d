"""How results become something to look at."""
