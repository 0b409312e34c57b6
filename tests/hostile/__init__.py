"""Files with an attacker's changes. Every function that reads files of their kind reads them.

``python -m tests.hostile`` reads all files, ``python -m tests.hostile WORD...`` only files with a word in their name.
"""
