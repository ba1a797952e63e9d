"""Tables, charts and pages of results."""
