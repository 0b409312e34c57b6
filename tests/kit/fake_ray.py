"""Ray's actors in one thread of this process. A test lets them die and restart."""

from __future__ import annotations

import asyncio
import inspect
import pickle
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import cloudpickle


class RayTaskError(Exception):
    def __init__(self, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.cause = cause


class RayActorError(Exception):
    actor_init_failed = False


class OutOfMemoryError(Exception):
    pass


class GetTimeoutError(Exception):
    pass


class ObjectLostError(Exception):
    pass


class FakeRay:
    """The part of Ray's module that a replay service uses. It copies all messages, and their arrays are read-only."""

    exceptions = SimpleNamespace(
        RayTaskError=RayTaskError,
        RayActorError=RayActorError,
        ObjectLostError=ObjectLostError,
        OutOfMemoryError=OutOfMemoryError,
        GetTimeoutError=GetTimeoutError,
    )

    def __init__(self) -> None:
        self.actors: dict[tuple[str, str], Actor] = {}
        self.loop = asyncio.new_event_loop()
        self.is_back = False
        self.free = {"CPU": 1.0}
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def is_initialized(self) -> bool:
        return True

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 4.0}

    def available_resources(self) -> dict[str, float]:
        return self.free

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(was_current_actor_reconstructed=self.is_back)

    def remote(self, kind: type) -> Any:
        def options(name: str, namespace: str, **others: Any) -> Any:
            def build(*args: Any) -> Actor:
                if (namespace, name) in self.actors:
                    raise ValueError("taken")
                actor = self.actors[namespace, name] = Actor(self, kind, sent(args))
                return actor

            return SimpleNamespace(remote=build)

        return SimpleNamespace(options=options)

    def get_actor(self, name: str, namespace: str) -> Actor:
        if (namespace, name) not in self.actors:
            raise ValueError("no such actor")
        return self.actors[namespace, name]

    def get(self, ref: Future[Any], timeout: float = 20.0) -> Any:
        try:
            return sent(ref.result(timeout))
        except (RayActorError, ObjectLostError, OutOfMemoryError):
            raise
        except TimeoutError as error:
            if ref.done():  # the request itself raised it
                raise RayTaskError(error) from error
            raise GetTimeoutError(f"no answer in {timeout:g} s") from error
        except Exception as error:
            raise RayTaskError(error) from error

    def wait(
        self, refs: list[Future[Any]], timeout: float, num_returns: int = 1
    ) -> tuple[list[Future[Any]], list[Future[Any]]]:
        ready, others = wait(refs, timeout)
        return list(ready), list(others)

    def settled(self) -> Future[None]:
        """Return a future that is done after all cancelled calls have ended."""

        async def nothing() -> None:
            await asyncio.sleep(0)

        return asyncio.run_coroutine_threadsafe(nothing(), self.loop)

    def kill(self, actor: Actor) -> None:
        self.actors = {name: each for name, each in self.actors.items() if each is not actor}
        actor.end("killed by ray.kill")

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class Actor:
    """A handle and its instance."""

    def __init__(self, ray: FakeRay, kind: type, args: Any) -> None:
        self._ray, self._kind, self._args = ray, kind, args
        self._under_way: set[Future[Any]] = set()
        self._ended = ""
        self.instance: Any = None
        self._run(self._build()).result(20)

    def __reduce__(self) -> Any:
        return _known, (id(self),)

    async def _build(self) -> None:
        self.instance = self._kind(*sent(self._args))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return SimpleNamespace(remote=lambda *args: self._run(self._called(name, sent(args))))

    @property
    def buffer(self) -> Any:
        """The buffer of a replay service's shard."""
        return self.instance._buffer

    @property
    def calls(self) -> int:
        """The number of running calls."""
        return len(self._under_way)

    async def _called(self, name: str, args: Any) -> Any:
        result = getattr(self.instance, name)(*args)
        return await result if inspect.isawaitable(result) else result

    def _run(self, coroutine: Any) -> Future[Any]:
        if self._ended:
            coroutine.close()
            failed: Future[Any] = Future()
            failed.set_exception(RayActorError(self._ended))
            return failed
        _HANDLES[id(self)] = self
        outer: Future[Any] = Future()
        inner = asyncio.run_coroutine_threadsafe(coroutine, self._ray.loop)

        def hand_on(done: Future[Any]) -> None:
            if not outer.done():
                error = RayActorError("it died") if done.cancelled() else done.exception()
                outer.set_exception(error) if error else outer.set_result(done.result())

        self._under_way.add(inner)
        inner.add_done_callback(self._under_way.discard)
        inner.add_done_callback(hand_on)
        return outer

    def _cancel(self) -> None:
        for each in list(self._under_way):
            each.cancel()
        self._ray.get(self._ray.settled())

    def end(self, why: str) -> None:
        self._ended = why
        self._cancel()

    def die(self) -> None:
        """Lose all contents, let running calls fail, and build the instance again, as Ray does."""
        self._ended = "it died"  # no request may reach the old instance
        self._cancel()
        with mock.patch.object(self._ray, "is_back", True):
            asyncio.run_coroutine_threadsafe(self._build(), self._ray.loop).result(20)
        self._ended = ""


_HANDLES: dict[int, Actor] = {}


def _known(number: int) -> Actor:
    return _HANDLES[number]


def sent(value: Any) -> Any:
    """Return the value as the receiver gets it."""
    buffers: list[pickle.PickleBuffer] = []
    pickled = cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(pickled, buffers=[bytes(buffer.raw()) for buffer in buffers])  # arrays are read-only, as in Ray


@contextmanager
def fake_ray() -> Iterator[FakeRay]:
    """Replace the module ``ray`` by a ``FakeRay``."""
    ray = FakeRay()
    known, sys.modules["ray"] = sys.modules.get("ray"), ray  # type: ignore[assignment]
    try:
        yield ray
    finally:
        del sys.modules["ray"]
        if known is not None:
            sys.modules["ray"] = known
        ray.stop()
