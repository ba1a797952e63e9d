"""A file for each command: its flags and paths, checked before what takes seconds is imported.

What a command does is in the module that it imports once they are understood.
"""
