from __future__ import annotations

import asyncio

import pytest

from edge.outbox import FULL_BYTES, Outbox
from enginelink.v1 import link_pb2

pytestmark = pytest.mark.anyio


def submit(handle: int, prompt_bytes: int = 4) -> link_pb2.Submit:
    return link_pb2.Submit(handle=handle, token_ids=bytes(prompt_bytes))


def update(conversation: str) -> link_pb2.ConversationUpdate:
    return link_pb2.ConversationUpdate(conversation_id=conversation, generating=link_pb2.Generating())


async def test_all_that_is_said_before_it_is_sent_is_one_message() -> None:
    outbox = Outbox()
    outbox.submit(submit(1))
    outbox.cancel(7)
    outbox.update(update("c"))
    outbox.submit(submit(2))

    message = await outbox.take()

    assert [one.handle for one in message.submits] == [1, 2]
    assert [one.handle for one in message.cancels] == [7]
    assert [one.conversation_id for one in message.updates] == ["c"]


async def test_long_prompts_become_several_messages_in_order_none_of_which_a_worker_would_refuse() -> None:
    outbox = Outbox()
    for handle in range(1, 6):
        outbox.submit(submit(handle, FULL_BYTES // 2))
    outbox.cancel(1)

    messages = [await outbox.take() for _ in range(3)]

    assert [[one.handle for one in message.submits] for message in messages] == [[1, 2], [3, 4], [5]]
    assert [len(message.cancels) for message in messages] == [0, 0, 1]
    assert all(message.ByteSize() < 64 << 20 for message in messages)


async def test_it_waits_for_something_to_send() -> None:
    outbox = Outbox()
    taking = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    assert not taking.done()

    outbox.cancel(3)

    assert (await asyncio.wait_for(taking, 5)).cancels[0].handle == 3
