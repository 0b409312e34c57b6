"""Console entry points. Their modules import torch only when a command runs, so that TAB completion stays fast."""
