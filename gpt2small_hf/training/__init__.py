"""How rows become checkpoints."""
