"""Read a hostile file in a separate process, and report the problems of the reading."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

from kit.hostile import MODULE

SECONDS = 10  # of processor time
ALLOWED_MEMORY = 200 << 20  # in addition to three times the file's size
WAIT = 180  # seconds until a waiting process is killed
MESSAGE = 4000  # characters
_LIMIT = 2 << 30  # additional bytes of address space for a reader, so that it cannot exhaust the machine
_OUTSIDE = ("subprocess.Popen", "os.system", "os.posix_spawn", "os.exec", "socket.connect", "socket.bind")
_CHANGES = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod")
_READ_ONLY = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_DIRECTORY", 0)


@dataclass(frozen=True)
class Base:
    """The parts that hostile files are made from.

    Attributes:
        run: The folder of the run.
        stored: The contents of its checkpoint, without checksums.
        pretrained: The folder of its published policy.
        settings: The config of each command.
    """

    run: Path
    stored: dict[str, Any]
    pretrained: Path
    settings: dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A hostile file: ``write`` puts it into a folder and returns its path.

    ``write`` also gets the path of a canary, a file that exists only if code in the hostile file has run.
    """

    kind: str
    name: str
    write: Callable[[Path, Base, str], Path]


@dataclass(frozen=True)
class Reading:
    """The result of one reading.

    Attributes:
        problems: A line for each fault.
        seconds: The processor time.
        memory: The highest memory during the reading beyond the memory before it, in bytes.
        size: The size of the file, in bytes.
    """

    problems: list[str]
    seconds: float
    memory: int
    size: int

    @property
    def beyond_size(self) -> int:
        """Return the memory beyond three times the size of the file."""
        return self.memory - 3 * self.size


def readings_of(
    case: Case, readers: Mapping[str, Callable[[Path, Base], object]], base: Base, folder: Path
) -> Iterator[tuple[str, Reading]]:
    """Write a file once, and yield the result of each reader. Each reader runs in its own forked process.

    Args:
        case: The file.
        readers: The readers by name. They get the path and work in their own folder.
        base: The parts that the file is made from.
        folder: A new folder.
    """
    sent, canary = folder / "sent", folder / "CANARY"
    sent.mkdir(parents=True)
    path = case.write(sent, base, str(canary))
    before = dict(_files(sent)), dict(_files(base.run))
    size = sum(entry[0] for entry in before[0].values())
    for name, read in readers.items():
        out = folder / "out"
        out.mkdir()
        (out / f"{MODULE}.py").write_text(f"open({str(canary)!r}, 'w')\ndef function(*_, **__): ...\n")
        found = _in_child(partial(read, path, base), out, size)
        problems: list[str] = found["problems"]
        if canary.exists():
            problems.append("code in the file ran")
            canary.unlink()
        if (now := (dict(_files(sent)), dict(_files(base.run)))) != before:
            problems.append("files beside it were changed")
            before = now
        shutil.rmtree(out)
        told = [f"{case.kind}: {case.name}, {name}: {problem}" for problem in problems]
        yield name, Reading(told, found.get("seconds", 0.0), found.get("memory", 0), size)
    shutil.rmtree(folder)


def _files(folder: Path) -> Iterator[tuple[str, tuple[int, int]]]:
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        yield str(path), (status.st_size if path.is_file() else 0, status.st_mtime_ns)


def _in_child(read: Callable[[], object], out: Path, size: int) -> dict[str, Any]:
    """Run a reader in a forked process; return its problems, processor time and memory."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(reading)
        try:
            result = _read(read, out, size)
        except BaseException:
            result = {"problems": [f"the test failed: {traceback.format_exc()[-800:]}"]}
        with contextlib.suppress(BaseException):
            os.write(writing, json.dumps(result).encode()[:60_000])
        os._exit(0)
    os.close(writing)
    status = _wait(pid)
    with os.fdopen(reading, "rb") as file:
        data = file.read()
    if data:
        found: dict[str, Any] = json.loads(data)
        return found
    if status is None:
        return {"problems": [f"it has not returned after {WAIT} s"]}
    number = -os.waitstatus_to_exitcode(status)
    reason = f"more than {2 * SECONDS} s of processor time" if number == signal.SIGXCPU else f"signal {number}"
    return {"problems": [f"the process was ended: {reason}"]}


def _wait(pid: int) -> int | None:
    deadline = time.monotonic() + WAIT
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def _read(read: Callable[[], object], out: Path, size: int) -> dict[str, Any]:
    os.chdir(out)
    said = os.open(out / "said", os.O_RDWR | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(said, stream)
    sys.stdout, sys.stderr = (open(stream, "w", buffering=1, closefd=False) for stream in (1, 2))  # noqa: SIM115
    warnings.resetwarnings()
    warnings.simplefilter("ignore")
    os.environ |= {"TMPDIR": str(out), "TORCHINDUCTOR_CACHE_DIR": str(out)}
    tempfile.tempdir = None  # a cached folder would override TMPDIR
    sys.dont_write_bytecode = True
    for name in ("register", "unregister"):  # the process ends without closing its locks
        setattr(resource_tracker, name, lambda *_: None)
    sys.path.append(str(out))  # a command also adds its working directory
    resource.setrlimit(resource.RLIMIT_AS, (_status("VmSize") + 3 * size + _LIMIT, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CPU, (2 * SECONDS + int(time.process_time()), 10 * SECONDS + 1000))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    modules, events = set(sys.modules), _watched(out)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak memory of the process
    memory, began = _status("VmRSS"), time.process_time()
    refused, lines, problems = None, 1, []
    try:
        read()
    except SystemExit as end:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
        if end.code:
            written = (out / "said").read_text(errors="replace").strip()
            refused, lines = end.code if isinstance(end.code, str) else written, 2
    except (ValueError, OSError) as error:
        refused = str(error)
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        problems.append(f"{type(error).__name__} in {Path(where.filename).name}:{where.lineno}: {str(error)[:200]}")
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
    seconds, used = time.process_time() - began, _status("VmHWM") - memory
    if refused is not None:
        if not refused or len(refused) > MESSAGE or len(refused.splitlines()) > lines:
            problems.append(
                f"the message has {len(refused.splitlines())} lines, {len(refused)} characters: {refused[:200]!r}"
            )
        if not all(line.isprintable() for line in refused.split("\n")):
            problems.append(f"the message holds control characters: {refused[:300]!r}")
    text = (out / "said").read_text(errors="replace")
    if any(not line.isprintable() for line in text.split("\n")):
        problems.append(f"control characters were printed: {text[:300]!r}")
    if seconds > SECONDS:
        problems.append(f"it took {seconds:.1f} s of processor time")
    if used > 3 * size + ALLOWED_MEMORY:
        problems.append(f"it took {used >> 20} MB for a file of {size / 1e6:.3g} MB")
    if strange := [name for name in sys.modules.keys() - modules if _is_strange(name, out)]:
        problems.append(f"modules were imported: {', '.join(sorted(strange)[:5])}")
    problems += sorted(set(events))[:5]
    return {"problems": problems, "seconds": seconds, "memory": used}


def _is_strange(name: str, out: Path) -> bool:
    """Return True if a module was imported from the sent files or the working folder."""
    if name.partition(".")[0] == MODULE:
        return True
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is not None and Path(file).is_relative_to(out.parent)


def _status(name: str) -> int:
    """Return an entry of the process's status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise LookupError(name)


def _watched(out: Path) -> list[str]:
    """Return a list that records the process's accesses outside of its folder from now on."""
    events: list[str] = []

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = arguments
            writes = any(sign in mode for sign in "wax+") if isinstance(mode, str) else bool((flags or 0) & 3)
            if writes and isinstance(path, str | bytes | os.PathLike) and _is_outside(path, out):
                events.append(f"it wrote {os.fsdecode(path)}")
        changes = event in _CHANGES and isinstance(arguments[0], str | bytes | os.PathLike)
        changes = changes and not (event == "os.mkdir" and os.path.isdir(arguments[0]))
        if event in _OUTSIDE or (changes and _is_outside(arguments[0], out)):
            events.append(f"it used {event}: {str(arguments)[:200]}")

    sys.addaudithook(note)
    return events


def _is_outside(path: Any, out: Path) -> bool:
    whole = Path(os.path.abspath(os.fsdecode(path)))
    if whole == Path("/dev/null") or whole.is_relative_to("/proc/self"):
        return False
    is_lock = whole.name.startswith("pym-") and whole.parent == Path("/dev/shm")  # a lock of multiprocessing
    return not whole.is_relative_to(out) and not is_lock
