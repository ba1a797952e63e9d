"""Score several models' answers to the same questions with a language model. Imports no torch."""
