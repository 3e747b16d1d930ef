"""Runs blocking work in a thread for a coroutine, so that nothing outlives a cancelled caller."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def offload(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return what a function returns, run in a thread of the event loop.

    `asyncio.to_thread` lets the function go on when its caller is cancelled. Here a function that
    has not begun never begins, and one that has is waited for before CancelledError is raised.
    """
    work: Future[T] = Future()
    call = partial(contextvars.copy_context().run, function, *args, **kwargs)
    asyncio.get_running_loop().run_in_executor(None, _begin, work, call)
    ended = asyncio.wrap_future(work)
    try:
        await asyncio.wait([ended])
    except asyncio.CancelledError as cancelled:
        if work.cancel():
            raise
        await _until_done(ended)
        # An error of the work is not lost: it is what the cancellation is raised from.
        raise cancelled from ended.exception()
    return ended.result()


async def together(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results in order; after an error or a cancellation none of them goes on."""
    if len(coroutines) <= 1:
        return [await one for one in coroutines]
    tasks = [asyncio.create_task(one) for one in coroutines]
    cancelled: asyncio.CancelledError | None = None
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    except asyncio.CancelledError as error:
        cancelled = error
    for task in tasks:
        task.cancel()
    cancelled = await _until_done(asyncio.gather(*tasks, return_exceptions=True)) or cancelled
    if cancelled is not None:
        raise cancelled
    failed = [task for task in tasks if not task.cancelled() and task.exception()]
    return [task.result() for task in failed or tasks]


def _begin(work: Future[T], call: Callable[[], T]) -> None:
    if not work.set_running_or_notify_cancel():
        return
    try:
        work.set_result(call())
    except BaseException as error:
        work.set_exception(error)


async def _until_done(ended: asyncio.Future[Any]) -> asyncio.CancelledError | None:
    """Wait for a future however often the waiting task is cancelled; return the last of these."""
    cancelled = None
    while not ended.done():
        try:
            await asyncio.wait([ended])
        except asyncio.CancelledError as error:
            cancelled = error
    return cancelled
