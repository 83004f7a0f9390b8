"""CUDA graphs without a GPU: a double of torch.cuda has the allocator's rules for pools; and which steps the decoder drops."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks.gpu.stand_ins import RecordedGraphs
from tests.engine.cuda.test_decoder import some_rows
from tests.engine.devices import here
from tinker_local_backend.engine.cuda.decoder import Decoder
from tinker_local_backend.engine.cuda.graphs import CudaGraphs
from tinker_local_backend.engine.model.attention import Reference
from tinker_local_backend.engine.model.base_model import BaseModel
from tinker_local_backend.engine.models import load_model

DEVICE = torch.device("cuda", 1)


class Card:
    """What torch keeps of captures: streams, pools with their users, and the pool that is being recorded to."""

    def __init__(self) -> None:
        self.streams = 0
        self.current: Any = "default"
        self.pools: dict[tuple[int, int], int] = {}
        """graphs that use each pool"""
        self.recording: set[tuple[int, int]] = set()
        self.captures: list[tuple[Any, tuple[int, int]]] = []
        """stream and pool of each capture"""
        self.refuses = False
        """the device refuses to end a capture: something in it was forbidden"""

    def new_pool(self) -> tuple[int, int]:
        self.pools[(0, len(self.pools) + 1)] = 0
        return (0, len(self.pools))

    def new_stream(self, device: torch.device) -> Any:
        assert device == DEVICE
        self.streams += 1
        return SimpleNamespace(wait_stream=lambda other: None)

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, graph: Any, pool: tuple[int, int], stream: Any, capture_error_mode: str) -> Iterator[None]:
        """As torch.cuda.graph with capture_begin and capture_end of a CUDAGraph."""
        assert capture_error_mode == "thread_local" and not gc.isenabled()
        before, self.current = self.current, stream
        if pool in self.recording:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        self.captures.append((stream, pool))
        self.pools[pool] += 1
        self.recording.add(pool)
        try:
            yield
        finally:
            if self.refuses:
                raise RuntimeError("operation failed due to a previous error during capture")
            self.recording.remove(pool)
            graph.pool = pool
            self.current = before

    def end(self, index: int, pool: tuple[int, int]) -> None:
        assert index == DEVICE.index
        if pool not in self.recording:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.recording.remove(pool)

    def release(self, index: int, pool: tuple[int, int]) -> None:
        assert index == DEVICE.index and self.pools[pool] > 0
        self.pools[pool] -= 1


class Graph:
    """As torch.cuda.CUDAGraph."""

    def __init__(self, card: Card):
        self.card, self.pool = card, None

    def replay(self) -> None:
        assert self.pool is not None

    def reset(self) -> None:
        if self.pool is not None:
            self.card.release(1, self.pool)
        self.pool = None


@pytest.fixture
def card() -> Iterator[Card]:
    card = Card()
    doubles = {
        "Stream": card.new_stream,
        "current_stream": lambda device: card.current if card.current != "default" else mock.MagicMock(),
        "stream": card.stream,
        "synchronize": lambda device: None,
        "graph_pool_handle": card.new_pool,
        "graph": card.graph,
        "CUDAGraph": lambda: Graph(card),
    }
    with (
        mock.patch.multiple(torch.cuda, **doubles),
        mock.patch.multiple(torch._C, _cuda_endAllocateToPool=card.end, _cuda_releasePool=card.release),
    ):
        yield card


def in_capture(card: Card, act: Callable[[], None]) -> Callable[[], torch.Tensor]:
    """A step that does something in its capture only."""

    def step() -> torch.Tensor:
        if card.recording:
            act()
        return torch.zeros(1)

    return step


def refuse(card: Card, error: Exception) -> Callable[[], None]:
    def act() -> None:
        card.refuses = True
        raise error

    return act


def test_all_captures_have_one_stream_and_one_pool(card: Card) -> None:
    graphs = CudaGraphs(DEVICE)
    replays = [graphs.capture(lambda: torch.zeros(1))[0] for _ in range(3)]
    assert card.streams == 1 and len(set(map(id, (stream for stream, _ in card.captures)))) == 1
    assert card.pools == {(0, 1): 3}
    for replay in replays:
        replay()


def test_released_graphs_leave_no_pool_and_the_next_capture_has_a_new_one(card: Card) -> None:
    graphs = CudaGraphs(DEVICE)
    kept = [graphs.capture(lambda: torch.zeros(1)) for _ in range(2)]
    before = graphs.epoch
    assert graphs.release() and graphs.epoch != before
    assert card.pools == {(0, 1): 0}
    assert not graphs.release(), "nothing is left to give back"
    again = graphs.capture(lambda: torch.zeros(1))
    assert card.pools == {(0, 1): 0, (0, 2): 1} and card.streams == 1
    del kept, again


def test_graphs_that_nobody_holds_are_not_kept(card: Card) -> None:
    graphs = CudaGraphs(DEVICE)
    graphs.capture(lambda: torch.zeros(1))
    assert not graphs.release()


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), ValueError("planted")])
def test_a_capture_that_the_device_refuses_to_end_leaves_the_next_ones_possible(card: Card, error: Exception) -> None:
    graphs = CudaGraphs(DEVICE)
    kept = graphs.capture(lambda: torch.zeros(1))
    before = card.current
    with pytest.raises(type(error), match=str(error)):  # its own error, not that of ending the capture
        graphs.capture(in_capture(card, refuse(card, error)))
    assert card.recording == set() and card.pools == {(0, 1): 0} and card.current == before
    card.refuses = False
    for _ in range(2):
        graphs.capture(lambda: torch.zeros(1))
    assert card.captures[-1][1] == (0, 2)
    del kept


def test_a_capture_that_fails_and_ends_as_usual_is_released_once(card: Card) -> None:
    graphs = CudaGraphs(DEVICE)

    def act() -> None:
        raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"):
        graphs.capture(in_capture(card, act))
    assert card.recording == set()
    graphs.capture(lambda: torch.zeros(1))
    assert card.captures[-1][1] == (0, 2)


@pytest.mark.parametrize("fails", [False, True])
def test_no_earlier_graph_is_collected_in_a_capture(card: Card, fails: bool) -> None:
    """The device refuses to destroy a graph in the thread that captures another one, and the capture is lost."""
    graphs, seen = CudaGraphs(DEVICE), []

    def act() -> None:
        seen.append(gc.isenabled())
        if fails:
            raise ValueError("planted")

    with pytest.raises(ValueError) if fails else nullcontext():
        graphs.capture(in_capture(card, act))
    assert seen == [False] and gc.isenabled()


# What the decoder does with them


@pytest.fixture(scope="module")
def model(tied_model: str) -> BaseModel:
    model = load_model(tied_model, here().device, here().dtype)
    model.execution = Reference()
    return model


class Counted(RecordedGraphs):
    """Counts captures."""

    def __init__(self) -> None:
        super().__init__()
        self.captures = 0

    def capture(self, step: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        self.captures += 1
        return super().capture(step)


def decoder_with(model: BaseModel, graphs: Counted) -> Decoder:
    return Decoder(model, model.new_cache(128), graphs, 128)


@torch.inference_mode()
def test_steps_that_were_given_back_are_captured_again(model: BaseModel) -> None:
    graphs = Counted()
    decoder = decoder_with(model, graphs)
    first = decoder.run(some_rows(), 2)
    decoder.run(some_rows(), 2)
    assert graphs.captures == 1
    model_released = graphs.release()
    again = decoder.run(some_rows(), 2)
    assert model_released and graphs.captures == 2
    assert first.tokens.tolist() == again.tokens.tolist()


@torch.inference_mode()
def test_smaller_steps_that_add_up_are_dropped_for_a_larger_one(model: BaseModel) -> None:
    graphs = Counted()
    decoder = decoder_with(model, graphs)
    for count in (16, 8, 4, 2, 1):  # the largest first: all share its memory
        decoder.run(some_rows(count), 1)
    assert graphs.epoch == 0 and graphs.captures == 5
    graphs.release()
    graphs.captures = 0
    for count in (8, 16, 17, 18):  # 8 + 16 rows are no more than 24
        decoder.run(some_rows(count), 1)
    assert graphs.epoch == 1 and graphs.captures == 3
    decoder.run(some_rows(30), 1)
    assert graphs.epoch == 2 and graphs.captures == 4
    for count in (1, 2, 4, 8, 16, 20, 30):
        decoder.run(some_rows(count), 1)
    assert graphs.epoch == 2 and graphs.captures == 10


@torch.inference_mode()
def test_rows_that_grow_never_hold_more_than_twice_the_largest_batch(model: BaseModel) -> None:
    graphs = Counted()
    decoder = decoder_with(model, graphs)
    for count in range(1, 31):
        decoder.run(some_rows(count), 1)
        assert sum(decoder._grown) <= 2 * max(decoder._grown)
    assert graphs.epoch == 1


@torch.inference_mode()
def test_a_step_keeps_logits_only_for_who_wants_them(model: BaseModel) -> None:
    decoder = decoder_with(model, Counted())
    assert decoder.run(some_rows(), 1).tempered is None
    tempered = decoder.run(some_rows(), 1, wants_logits=True).tempered
    assert tempered is not None and tempered.shape == (3, model.vocab_size)
    kept = {kind[-1]: result for kind, (_, result) in decoder._captured.items()}
    assert kept[False] is decoder.state.results and kept[True].shape[1] == model.vocab_size


@torch.inference_mode()
def test_a_step_that_cannot_be_captured_is_named(model: BaseModel) -> None:
    class Refusing(Counted):
        def capture(self, step: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
            raise ValueError("planted")

    with pytest.raises(RuntimeError, match=r"capturing a decode step of 4 rows failed \(ValueError: planted\)"):
        decoder_with(model, Refusing()).run(some_rows(), 1)


@torch.inference_mode()
def test_out_of_memory_in_a_capture_is_raised_as_it_is(model: BaseModel) -> None:
    class Full(Counted):
        def capture(self, step: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
            raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        decoder_with(model, Full()).run(some_rows(), 1)
