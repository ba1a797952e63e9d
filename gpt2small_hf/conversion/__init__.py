"""Models of other code bases to ours, and ours to transformers' GPT-2."""
