"""The names of the contenders of whole training runs."""

OURS, ONE, COMMAND = "ours", "ours, one", "ours, as the command runs"
SB3, SB3_FOUR = "Stable-Baselines3", "Stable-Baselines3, four"
LEAN, LEAN_OURS = "Stable-Baselines3, lean", "Stable-Baselines3, lean, our Adam"
SBX, SBX_FOUR, TIANSHOU, BARE, REJAX = "SBX", "SBX, four", "Tianshou", "bare loop", "rejax"
ANY_SBX = (SBX, SBX_FOUR)
