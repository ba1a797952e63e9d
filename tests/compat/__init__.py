"""A published folder in other people's hands: real libraries, and no adapter of ours. Extras: `compat`, `int8`."""
