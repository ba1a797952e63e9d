"""What a stranger runs: the model and its Transformers face. These files are published as they are."""
