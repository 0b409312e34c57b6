"""Files that somebody may send to do harm, each read by every function that reads files of its kind.

``python -m tests.hostile`` runs all of them, ``python -m tests.hostile WORD...`` those whose names contain a word.
"""
