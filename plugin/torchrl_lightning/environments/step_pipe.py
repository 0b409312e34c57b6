"""One end of the pipe between a vector environment and the process of a copy, on which steps need no pickles."""

from __future__ import annotations

import pickle
import struct
from typing import Any

import numpy as np
from gymnasium import spaces

_STEP, _STEPPED = b"s", b"r"  # how what is not pickled begins; pickles begin otherwise
_RESULT = struct.Struct("d??")


class StepPipe:
    """A connection that sends actions, and rewards and ends, as bytes, and all else as ``Connection`` does.

    Of an environment whose observations go through shared memory, which is what takes long is the pickling of each
    message. Info is pickled where there is some.

    Args:
        connection: The end of a pipe.
        space: Of the actions; others than those of one array are pickled.

    Examples:
        >>> from multiprocessing import Pipe
        >>> ours, theirs = (StepPipe(end, spaces.Discrete(3)) for end in Pipe())
        >>> ours.send(("step", np.int64(2)))
        >>> theirs.recv()
        ('step', np.int64(2))
        >>> theirs.send(((None, 1.0, False, True, {}), True))
        >>> ours.recv()
        ((None, 1.0, False, True, {}), True)
    """

    def __init__(self, connection: Any, space: spaces.Space[Any]) -> None:
        self._connection = connection
        is_array = isinstance(space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary)
        self._dtype = np.dtype(space.dtype) if is_array else None
        self._shape = space.shape or ()
        self._is_box = isinstance(space, spaces.Box)
        self._steps = False  # whether the message before was a step

    def send(self, message: Any) -> None:
        """Send a command, or what became of one."""
        kind, content = message
        is_array = self._dtype is not None and isinstance(content, np.ndarray | np.generic)
        if kind == "step" and is_array and content.dtype == self._dtype:
            return self._connection.send_bytes(_STEP + content.tobytes())
        if self._steps and content:
            observation, reward, terminated, truncated, info = kind
            try:
                result = _RESULT.pack(reward, terminated, truncated)
            except struct.error:
                return self._connection.send(message)
            if observation is None:
                return self._connection.send_bytes(_STEPPED + result + (pickle.dumps(info) if info else b""))
        return self._connection.send(message)

    def recv(self) -> Any:
        """Return a command, or what became of one."""
        data = self._connection.recv_bytes()
        kind = data[:1]
        self._steps = kind == _STEP
        if kind == _STEP:
            action = np.frombuffer(data, self._dtype, offset=1).reshape(self._shape)
            return "step", action.copy() if self._is_box or self._shape else action[()]
        if kind == _STEPPED:
            end = 1 + _RESULT.size
            info = pickle.loads(data[end:]) if len(data) > end else {}
            return (None, *_RESULT.unpack(data[1:end]), info), True
        return pickle.loads(data)

    @property
    def closed(self) -> bool:
        """Return whether the connection is closed."""
        return bool(self._connection.closed)

    def poll(self, timeout: float | None = 0.0) -> bool:
        """Return whether a message has come."""
        return bool(self._connection.poll(timeout))

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()
