"""Recipe and flags → the settings of a run. Nothing here imports torch."""
