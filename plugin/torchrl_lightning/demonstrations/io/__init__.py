"""Read, write and record demonstrations: safetensors, NumPy, D4RL, Minari, directories and the keyboard.

Code belongs here if it converts demonstrations from or to something outside this process.
"""
