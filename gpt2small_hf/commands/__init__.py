"""One module for each command: it checks flags and paths, and then imports the module that does the work."""
