"""Who trains in `end_to_end.py`: one file each."""
