"""Limits of untrusted files, which are checked before a file takes memory or time."""

from __future__ import annotations

# -- checkpoints and states ------------------------------------------------------------------------------------------
CHECKPOINT_VALUES = 1_000_000
"""Values in a checkpoint, each counted once per reference."""
CHECKPOINT_DEPTH = 64
"""Levels of dicts and lists in a checkpoint."""
CHECKPOINT_TEXT = 1 << 26
"""Characters of all strings in a checkpoint, each counted once per reference."""
PICKLE_BYTES = 1 << 25
"""Bytes of the pickle of a checkpoint, which stores everything except the data of tensors."""
PICKLE_OPERATIONS = 1_000_000
"""Operations in the pickle of a checkpoint."""
PICKLE_DIGITS = 32
"""Bytes of an integer in the pickle of a checkpoint; the states of NumPy's generators take 16 bytes."""
KEY_PARTS = 16
"""Parts of a key that is a tuple."""
DIRECTORY_BYTES = 1 << 23
"""Bytes of the directory of a checkpoint's zip file, which takes about 100 bytes for each tensor."""
TENSOR_DIMENSIONS = 64
"""Dimensions of a tensor."""
ELEMENTS_PER_BYTE = 4
"""Bytes of all tensors of a checkpoint per byte of the file. An element that tensors share counts for each tensor."""
ELEMENTS_LEAST = 1 << 20
"""Bytes of tensors that a checkpoint of any size may have."""

MANIFEST_BYTES = 1 << 26
"""Bytes of the manifest of a state in a folder."""
MANIFEST_VALUES = 1_000_000
"""Values in a manifest; a value takes up to 64 bytes in memory and 3 bytes in the file."""
PRETRAINED_BYTES = 1 << 31
"""Bytes of the weights of a published policy."""
PRETRAINED_CONTENT = 1 << 22
"""Bytes of the other content of a published policy."""

# -- configs and logs of runs ----------------------------------------------------------------------------------------
YAML_BYTES = 1 << 18
"""Bytes of a YAML file; the config of a run has less than 20,000 bytes."""
YAML_DEPTH = 32
"""Levels of a YAML file."""
YAML_VALUES = 50_000
"""Values in a YAML file; each alias counts as all values of its anchor."""
YAML_INTERPOLATION = 1000
"""Characters of a string with an interpolation."""
YAML_REFERENCES = 8
"""Interpolations in the chain that leads to a value."""
OVERRIDES = 500
"""Overrides of the command in a checkpoint; Hydra takes a millisecond to parse one override."""
LOG_BYTES = 1 << 28
"""Bytes of a CSV log."""
LOG_LINES = 1_000_000
"""Lines of a CSV log."""
LOG_LINE = 1 << 20
"""Characters of a line in a CSV log."""
SHOWN_BUFFERS = 64
"""Buffers of one source in an inspection."""
SHOWN_ENTRIES = 500
"""Entries of one buffer in an inspection."""

# -- parts that a config in a file names -----------------------------------------------------------------------------
BUILT_PER_BYTE = 8
"""Bytes of the tensors that are created while networks are built, per byte of the stored weights."""
BUILT_LEAST = 1 << 26
"""Bytes that networks of any size may create while they are built."""
OPERATIONS_PER_WEIGHT = 200
"""Torch operations while networks are built, per stored weight."""
OPERATIONS_LEAST = 20_000
"""Allowed torch operations while networks are built, for networks of any size."""
COUNT = 1 << 28
"""Cells of a buffer."""
WIDTH = 1 << 17
"""Largest integer in settings other than cells, times and seeds, such as units of a layer or environments."""
LENGTH = 4096
"""Largest integer in the settings of an environment and its wrappers, such as stacked frames and pixels of a side."""

# -- optimizers ------------------------------------------------------------------------------------------------------
OPTIMIZER_STEPS = 1 << 40
"""Steps that an optimizer has made."""
OPTIMIZER_COUNT = 10_000
"""Largest integer in the settings of an optimizer, such as a number of iterations."""

# -- data sets -------------------------------------------------------------------------------------------------------
FILE_BYTES = 1 << 30
"""Bytes of a demonstrations or D4RL file, and of the arrays unpacked from the file."""
COLLECTION_BYTES = 1 << 32
"""Unpacked bytes of all files in a directory of demonstrations, or of a Minari data set."""
MINARI_BYTES = 1 << 24
"""Bytes of the metadata of a Minari data set; the bounds of an image of 640 x 480 pixels take 10 MB."""
MINARI_VALUES = 1 << 20
"""Values in the metadata of a Minari data set. The metadata stores spaces as strings, which count by their bytes."""
UNPACKED_AT_ONCE = 1 << 24
"""Bytes of a compressed array that are unpacked at a time."""
