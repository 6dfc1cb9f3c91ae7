from __future__ import annotations

import asyncio

import pytest

from services.dpu_gateway.errors import UnavailableError
from services.dpu_gateway.streams import RequestName, Stream


async def test_a_stream_that_fails_just_as_its_write_is_given_up_ends_with_that_failure() -> None:
    """The write's limit has expired and its coroutine has not run since: the reader, who fails the stream, goes on."""
    loop = asyncio.get_running_loop()
    stream = Stream(RequestName("", "r"), slot=0, position=1, tag=1, span=0, with_logprobs=False)
    sending = asyncio.create_task(stream.send(asyncio.Event().wait(), 0.01, 1.0))
    await asyncio.sleep(0)
    limit = stream._write_limit
    assert limit is not None
    failed = loop.create_future()

    def fail() -> None:
        if not limit.expired():
            loop.call_soon(fail)
            return
        try:
            stream.fail(UnavailableError("the engine is lost", 1.0))
        except RuntimeError as error:
            failed.set_exception(error)
        else:
            failed.set_result(None)

    fail()
    await failed
    with pytest.raises(UnavailableError, match="the engine is lost"):
        await sending
