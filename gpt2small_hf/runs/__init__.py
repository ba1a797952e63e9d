"""Run folders and prepared data sets on disk: layout, files, provenance."""
