"""Evaluation of models: held-out loss, overlap, completions and answers."""
