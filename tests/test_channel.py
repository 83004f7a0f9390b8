"""Frames between two processes: their order, whatever the kernel takes at once, and who may write."""

import gc
import os
import socket
import threading
import weakref
from collections.abc import Iterator

import pytest

from tinker_local_backend.wire.frames import Channel, Frame

LARGE = bytes(range(256)) * 16_384
"""4 MiB: more than a socket holds."""


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    channels = [Channel(sock, "test-channel") for sock in socket.socketpair()]
    yield channels[0], channels[1]
    for channel in channels:
        channel.close()


def received(channel: Channel, count: int) -> list[Frame]:
    frames = [channel.receive() for _ in range(count)]
    assert None not in frames
    return [frame for frame in frames if frame is not None]


def test_frames_keep_their_order_when_the_kernel_takes_only_part_of_one(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    sizes = [0, len(LARGE), 10, len(LARGE), 0, 3]
    for number, size in enumerate(sizes):  # nobody reads yet, and nobody waits
        ours.send(lambda number=number, size=size: Frame({"number": number}, LARGE[:size]))
    frames = received(theirs, len(sizes))
    assert [frame.fields["number"] for frame in frames] == list(range(len(sizes)))
    assert all(frame.body == LARGE[:size] for frame, size in zip(frames, sizes, strict=True))


def test_each_threads_frames_keep_their_order_and_none_is_lost(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    threads, each = 4, 200

    def send(thread: int) -> None:
        for number in range(each):
            ours.send(lambda number=number: Frame({"thread": thread, "number": number}, LARGE[: number * 50]))

    senders = [threading.Thread(target=send, args=(thread,)) for thread in range(threads)]
    for sender in senders:
        sender.start()
    frames = received(theirs, threads * each)
    for sender in senders:
        sender.join()
    for thread in range(threads):
        assert [f.fields["number"] for f in frames if f.fields["thread"] == thread] == list(range(each))


def test_a_finalizer_that_interrupts_a_frame_in_the_making_sends_behind_it(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends

    class Held:
        pass

    def made() -> Frame:
        held = Held()
        weakref.finalize(held, ours.send, lambda: Frame({"what": "finalizer"}))
        del held
        gc.collect()
        return Frame({"what": "frame"})

    ours.send(made)
    assert [frame.fields["what"] for frame in received(theirs, 2)] == ["frame", "finalizer"]


def test_a_forked_child_writes_nothing_and_closes_nothing_of_its_parents(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    child = os.fork()
    if child == 0:
        ours.send(lambda: Frame({"from": "child"}))
        ours.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    ours.send(lambda: Frame({"from": "parent"}))
    assert received(theirs, 1)[0].fields == {"from": "parent"}


def test_after_the_other_side_has_gone_frames_are_dropped(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    theirs.close()
    ours.send(lambda: Frame(body=LARGE))
    ours.send(lambda: Frame())
    assert ours.receive() is None
