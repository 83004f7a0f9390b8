"""A sampling client is a frozen copy, and serving several at once changes nothing in any of them."""

from collections.abc import Sequence

import tinker

from tests.engine.devices import here
from tests.engine.helpers import (
    STEP,
    assert_near,
    assert_repeats,
    assert_same,
    assert_samples_agree,
    cross_entropy_datum,
    make_training_client,
    params,
    prompt,
    random_tokens,
    weights,
)
from tinker_local_backend import SamplingClient, ServiceClient, TrainingClient

PROMPTS = [random_tokens(n, n) for n in (3, 11, 6)]


def train(client: TrainingClient, steps: int, seed: int = 0) -> None:
    for step in range(steps):
        client.forward_backward([cross_entropy_datum(8, seed + step)], "cross_entropy")
        client.optim_step(STEP).result()


def outputs(client: SamplingClient, **fields) -> list[tinker.SampledSequence]:
    """Samples of a few requests, seeded."""
    futures = [client.sample(prompt(p), 2, params(10, seed=i, **fields)) for i, p in enumerate(PROMPTS)]
    return [sequence for future in futures for sequence in future.result().sequences]


def scores(client: SamplingClient) -> list[list[float | None]]:
    return [client.compute_logprobs(prompt(p)).result() for p in PROMPTS]


def assert_unchanged(
    client: TrainingClient, found: Sequence[tinker.SampledSequence], expected: Sequence[tinker.SampledSequence]
) -> None:
    """The same samples, with the same bits where the tests ask the most.

    The bits of a convolution depend on which sequences are in its batch, and that on when they were asked for.
    """
    assert_samples_agree(found, expected)
    if here().is_reference and not client._run.model.mixers:
        assert [s.logprobs for s in found] == [s.logprobs for s in expected]


def test_training_after_its_creation_changes_nothing_in_a_snapshot(training: TrainingClient) -> None:
    snapshot = training.save_weights_and_get_sampling_client().result()
    sampled, scored = outputs(snapshot), scores(snapshot)
    train(training, 3)
    assert_unchanged(training, outputs(snapshot), sampled)
    assert_repeats(scores(snapshot), scored)
    assert scores(training.save_weights_and_get_sampling_client().result()) != scored


def test_a_snapshot_holds_what_was_submitted_before_it_and_nothing_after(
    service: ServiceClient, tied_model: str
) -> None:
    waited, pipelined = (make_training_client(service, tied_model) for _ in range(2))
    train(waited, 1)
    expected = scores(waited.save_weights_and_get_sampling_client().result())
    pipelined.forward_backward([cross_entropy_datum(8, 0)], "cross_entropy")
    pipelined.optim_step(STEP)
    future = pipelined.save_weights_and_get_sampling_client()
    pipelined.forward_backward([cross_entropy_datum(8, 1)], "cross_entropy")
    pipelined.optim_step(STEP).result()
    assert_repeats(scores(future.result()), expected)


def test_training_while_a_snapshot_is_sampled_changes_nothing_in_its_samples(training: TrainingClient) -> None:
    snapshot = training.save_weights_and_get_sampling_client().result()
    request = params(60, seed=4, stop=[])
    alone = snapshot.sample(prompt(PROMPTS[0]), 3, request).result().sequences
    sampling = snapshot.sample(prompt(PROMPTS[0]), 3, request)
    for step in range(10):
        training.forward_backward([cross_entropy_datum(8, step)], "cross_entropy")
        training.optim_step(STEP)
    among = sampling.result().sequences
    assert_unchanged(training, among, alone)


def test_snapshots_and_base_served_in_one_batch_equal_each_served_alone(
    service: ServiceClient, tied_model: str, base_sampler: SamplingClient
) -> None:
    """Adapters of different rank and different modules, all asked the same prompts at once."""
    first = make_training_client(service, tied_model, rank=4)
    second = make_training_client(service, tied_model, rank=2, seed=5, train_mlp=False, train_unembed=False)
    old = first.save_weights_and_get_sampling_client().result()
    train(first, 2)
    clients = [old, first.save_weights_and_get_sampling_client().result()]
    clients += [second.save_weights_and_get_sampling_client().result(), base_sampler]
    alone = [outputs(client, stop=[]) for client in clients]
    scored = [scores(client) for client in clients]
    assert len({str(s) for s in scored}) == len(clients)

    together: list[list] = [[] for _ in clients]
    prompt_scores: list[list] = [[] for _ in clients]
    for i, tokens in enumerate(PROMPTS):
        for row, client in zip(together, clients, strict=True):
            row.append(client.sample(prompt(tokens), 2, params(10, seed=i, stop=[])))
        for row, client in zip(prompt_scores, clients, strict=True):
            row.append(client.compute_logprobs(prompt(tokens)))
    for futures, expected in zip(together, alone, strict=True):
        found = [sequence for future in futures for sequence in future.result().sequences]
        assert_samples_agree(found, expected, atol=1e-4)
    for futures, expected in zip(prompt_scores, scored, strict=True):
        for future, wanted in zip(futures, expected, strict=True):
            found = future.result()
            assert found[0] is None and wanted[0] is None
            assert_near(found[1:], wanted[1:], atol=1e-4)


def test_interleaved_training_clients_end_where_each_would_alone(service: ServiceClient, tied_model: str) -> None:
    alone = []
    for rank, seed in ((4, 0), (2, 7)):
        client = make_training_client(service, tied_model, rank=rank, seed=seed)
        train(client, 3, seed)
        alone.append(weights(client))
    pair = [make_training_client(service, tied_model, rank=rank, seed=seed) for rank, seed in ((4, 0), (2, 7))]
    for step in range(3):
        for client, seed in zip(pair, (0, 7), strict=True):
            client.forward_backward([cross_entropy_datum(8, seed + step)], "cross_entropy")
        for client in pair:
            client.optim_step(STEP)
    for client, expected in zip(pair, alone, strict=True):
        client.get_info()
        client.save_weights_and_get_sampling_client().result()
        assert_repeats(weights(client), expected)


def test_a_fresh_adapter_is_the_identity(service: ServiceClient, tied_model: str, base_sampler: SamplingClient) -> None:
    client = service.create_lora_training_client(tied_model, rank=4, seed=0).result()
    fresh = client.save_weights_and_get_sampling_client().result()
    assert_repeats(scores(fresh), scores(base_sampler))


def test_a_seed_makes_the_same_adapter_and_none_makes_another(service: ServiceClient, tied_model: str) -> None:
    def start(seed: int | None) -> dict:
        return weights(service.create_lora_training_client(tied_model, rank=2, seed=seed).result())

    assert_same(start(3), start(3))
    name = "lm_head.lora_A.weight"
    assert len({start(seed)[name].tobytes() for seed in (3, 4, None, None)}) == 4


def test_info_and_tokenizer_name_the_base_model(training: TrainingClient, tied_model: str) -> None:
    info = training.get_info()
    assert (info.model_name, info.lora_rank, info.is_lora) == (tied_model, 4, True)
    assert info.model_id == training.model_id
    parts = dict(training._run.model.execution.parts())
    assert bool(parts) == (here().captured or here().device.type == "cuda")
    assert info.execution == {
        "device": str(here().device),
        "dtype": str(here().dtype).removeprefix("torch."),
        "path": "cuda" if parts else "reference",
        **parts,
    }
    snapshot = training.save_weights_and_get_sampling_client().result()
    assert snapshot.get_base_model() == tied_model
    assert snapshot.get_tokenizer() is training.get_tokenizer()
