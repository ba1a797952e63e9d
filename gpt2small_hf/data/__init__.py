"""How text becomes rows."""
