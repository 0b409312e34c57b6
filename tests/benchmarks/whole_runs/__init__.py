"""Contenders of `end_to_end.py`, one file each."""
