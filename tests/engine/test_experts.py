"""Routed experts: computed as transformers does, never changed, and adapters that leave them frozen."""

import copy
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GptOssConfig,
    JetMoeConfig,
    NemotronHConfig,
    PretrainedConfig,
    Qwen3MoeConfig,
)
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts
from transformers.utils.quantization_config import Mxfp4Config

from tests.engine.conftest import SHAPE, write_model
from tests.engine.devices import here
from tests.engine.helpers import (
    STEP,
    assert_close,
    cross_entropy_datum,
    drop_gradients,
    gradients,
    make_training_client,
    params,
    prompt,
    random_tokens,
)
from tests.engine.test_checkpoints import folder
from tests.engine.test_families import write_family
from tinker_local_backend import ModelLoadError, RequestError, ServiceClient
from tinker_local_backend.engine.model import experts
from tinker_local_backend.engine.model.attention import PackedPlan, Segment
from tinker_local_backend.engine.model.expert_matrices import by_tensor
from tinker_local_backend.engine.model.experts import EXPERTS_NAME
from tinker_local_backend.engine.model.grouped_experts import GROUPED_NAME
from tinker_local_backend.engine.model.lora_spec import ExpertLayout, LoraSpec
from tinker_local_backend.engine.model.paged_attention import LayerAttention
from tinker_local_backend.engine.model.refusals import refuse_unsupported
from tinker_local_backend.engine.models import load_model
from tinker_local_backend.engine.training.activations import ActivationBudget
from tinker_local_backend.merge import merge_adapter

PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
TOKENS, CHOSEN, WIDTH, NUMBER = 13, 3, 8, 7
SMALL: dict[str, Any] = {"hidden_size": WIDTH, "num_experts_per_tok": CHOSEN}
KINDS: dict[str, tuple[Any, PretrainedConfig]] = {
    "gated": (Qwen3MoeExperts, Qwen3MoeConfig(**SMALL, num_experts=NUMBER, moe_intermediate_size=8)),
    "transposed, with biases": (
        GptOssExperts,
        GptOssConfig(**SMALL, num_local_experts=NUMBER, intermediate_size=8, swiglu_limit=0.3),
    ),
    "without a gate": (NemotronHExperts, NemotronHConfig(**SMALL, n_routed_experts=NUMBER, moe_intermediate_size=8)),
}


PRECISION = {GROUPED_NAME: (torch.float32, 1e-4)}
"""dtype and bound of a way of computing that is not in float64"""
EXACT = (torch.float64, 1e-10)


def make_experts(kind: str, way: str, dtype: torch.dtype = torch.float64) -> Any:
    """The same random experts, which compute in one way or another."""
    make, config = KINDS[kind]
    config = copy.deepcopy(config)
    config._experts_implementation = way
    module = make(config).to(dtype).requires_grad_(False)
    generator = torch.Generator().manual_seed(3)
    for parameter in module.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return module


def routed(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, their experts, and how much of each. Nobody goes to the last expert."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    index = torch.stack([torch.randperm(NUMBER - 1, generator=generator)[:CHOSEN] for _ in range(TOKENS)])
    return x, index, torch.rand(TOKENS, CHOSEN, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("name", [EXPERTS_NAME, GROUPED_NAME])
@pytest.mark.parametrize("kind", KINDS)
def test_experts_and_their_gradients_are_those_of_transformers(kind: str, name: str) -> None:
    x, index, shares = routed()
    found, expected = [], []
    dtype, bound = PRECISION.get(name, EXACT)
    for way, used, results in ((name, dtype, found), ("eager", torch.float64, expected)):
        leaves = x.to(used, copy=True).requires_grad_(), shares.to(used, copy=True).requires_grad_()
        out = make_experts(kind, way, used)(leaves[0], index, leaves[1])
        gradient = torch.linspace(-1, 1, out.numel(), dtype=used).view(out.shape)
        results += [out.detach(), *torch.autograd.grad(out, leaves, gradient)]
    for ours, theirs in zip(found, expected, strict=True):
        assert theirs.abs().max() > 0.1
        torch.testing.assert_close(ours.double(), theirs, rtol=bound, atol=bound)


def test_a_token_alone_gets_what_it_gets_among_others() -> None:
    module, (x, index, shares) = make_experts("gated", EXPERTS_NAME), routed()
    together = module(x, index, shares)
    for i in range(TOKENS):
        alone = module(x[i : i + 1], index[i : i + 1], shares[i : i + 1])
        torch.testing.assert_close(alone[0], together[i], rtol=1e-13, atol=1e-13)


def test_experts_without_tokens_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    linear = experts.linear

    def counted(x: torch.Tensor, *weights: torch.Tensor | None) -> torch.Tensor:
        rows.append(len(x))
        return linear(x, *weights)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(experts, "linear", counted)
    x, index, shares = routed()
    make_experts("gated", EXPERTS_NAME)(x[:1], index[:1], shares[:1])
    assert rows == [1] * (2 * CHOSEN), "two products for each of the token's experts"


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {name: write_family(name, tmp_path_factory.mktemp(name)) for name in ("qwen2-moe", "gpt-oss")}


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.WARNING):
        yield caplog


def test_training_changes_no_weight_of_the_model(service: ServiceClient, paths: dict[str, str]) -> None:
    client = make_training_client(service, paths["gpt-oss"], train_mlp=False)
    module = client._run.model.module
    before = {name: (weight.dtype, weight.clone()) for name, weight in module.named_parameters()}
    assert any(weight.dim() == 3 for _, weight in before.values()) and any("router" in name for name in before)
    client.forward_backward([cross_entropy_datum(9, 0)], "cross_entropy").result()
    client.optim_step(STEP).result()
    for name, weight in module.named_parameters():
        assert not weight.requires_grad and weight.grad is None
        assert weight.dtype == before[name][0] and torch.equal(weight, before[name][1])


def test_recomputed_layers_have_the_same_gradients(
    service: ServiceClient, paths: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = make_training_client(service, paths["qwen2-moe"])
    found = []
    for must in (False, True):
        monkeypatch.setattr(ActivationBudget, "must_recompute", lambda self, tokens, must=must: must)
        client.forward_backward([cross_entropy_datum(n, n) for n in (5, 30)], "cross_entropy").result()
        found.append(gradients(client))
        drop_gradients(client)
    assert_close(*found, rtol=1e-5)


def test_an_adapter_without_anything_in_mlps_is_refused(service: ServiceClient, paths: dict[str, str]) -> None:
    with pytest.raises(
        RequestError, match=r"train_mlp=True: the MLPs of model .* routed experts.*pass train_mlp=False.*=shared_outer"
    ):
        service.create_lora_training_client(paths["gpt-oss"], 4, expert_lora="frozen").result()
    client = service.create_lora_training_client(paths["gpt-oss"], 4, train_mlp=False).result()
    leaves = {name.rpartition(".")[2] for name in client._run.state.adapter.a}
    assert leaves == {"q_proj", "k_proj", "v_proj", "o_proj", "lm_head"}


def test_where_routed_experts_are_frozen_shared_ones_train_and_it_says_so(
    paths: dict[str, str], warnings: pytest.LogCaptureFixture
) -> None:
    model = load_model(paths["qwen2-moe"])
    model.new_adapter(LoraSpec(4), seed=0)
    adapter = model.new_adapter(LoraSpec(4), seed=0)
    assert warnings.text.count("routed experts stay frozen") == 1
    mlps = {name for name in adapter.a if ".mlp." in name}
    assert len(mlps) == 3 * SHAPE["num_hidden_layers"] and all(".mlp.shared_expert." in name for name in mlps)


@pytest.mark.parametrize("layout", ["shared_outer", "per_expert", "frozen"])
@pytest.mark.parametrize("name", ["qwen2-moe", pytest.param("gpt-oss", marks=pytest.mark.slow)])
def test_peft_and_a_merged_model_compute_the_same(
    name: str, layout: ExpertLayout, service: ServiceClient, home: Path, paths: dict[str, str], tmp_path: Path
) -> None:
    train_mlp = (name, layout) != ("gpt-oss", "frozen")
    client = make_training_client(service, paths[name], train_mlp=train_mlp, expert_lora=layout)
    saved = client.save_weights_for_sampler(f"peft-{name}").result().path
    tokens = random_tokens(20, 1)

    def load(path: str | Path) -> Any:
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, experts_implementation="eager").eval()

    def logits(model: Any) -> torch.Tensor:
        with torch.no_grad():
            return model(torch.tensor([tokens])).logits[0]

    without = logits(load(paths[name]))
    expected = logits(PeftModel.from_pretrained(load(paths[name]), str(folder(home, saved))))
    assert (expected - without).abs().max() > 0.1
    sampler = service.create_sampling_client(saved).result()
    wanted = expected.log_softmax(-1)[:-1].gather(1, torch.tensor(tokens)[1:, None])[:, 0]
    found = torch.tensor(sampler.compute_logprobs(prompt(tokens)).result()[1:])
    torch.testing.assert_close(found, wanted, atol=here_bound(), rtol=0)
    result = merge_adapter(saved, tmp_path / "merged", home=home)
    adapter = client._run.state.adapter
    linears, tensors = adapter.a.keys() - {m.name for m in adapter.experts}, by_tensor(adapter.experts)
    assert result.modules == len(linears) + len(tensors)
    assert len(tensors) == (0 if layout == "frozen" else 2 * SHAPE["num_hidden_layers"])
    torch.testing.assert_close(logits(load(tmp_path / "merged")), expected, rtol=1e-4, atol=1e-4)


def here_bound() -> float:
    return 2e-5 if here().is_reference else 0.1


def test_the_matrices_of_shared_experts_have_the_names_of_linears(
    service: ServiceClient, home: Path, paths: dict[str, str]
) -> None:
    """As PEFT, vLLM and the hosted service call them: the path of the linear and lora_A or lora_B."""
    client = make_training_client(service, paths["qwen2-moe"], expert_lora="frozen")
    saved = client.save_weights_for_sampler("names").result().path
    names = set(load_file(folder(home, saved) / "adapter_model.safetensors"))
    prefix = "base_model.model.model.layers.1."
    assert f"{prefix}mlp.shared_expert.down_proj.lora_A.weight" in names
    assert f"{prefix}self_attn.o_proj.lora_B.weight" in names
    assert not any(".experts." in name for name in names)


def test_experts_quantized_by_another_method_are_refused_by_name() -> None:
    config: Any = GptOssConfig(**SHAPE)
    config.quantization_config = {"quant_method": "quark"}
    with pytest.raises(ModelLoadError, match=r"\(gpt_oss\) is quantized with quark; the local engine loads .*mxfp4"):
        refuse_unsupported("openai/gpt-oss-20b", config)


@pytest.mark.slow
def test_a_copy_in_bfloat16_of_a_quantized_model_loads(tmp_path: Path) -> None:
    """It is what loading the quantized one gives; written without `save_original_format` its experts would be missing."""
    shape = {**SHAPE, "hidden_size": 64, "intermediate_size": 64}  # blocks have 32 numbers
    config: Any = GptOssConfig(**shape, num_local_experts=4, num_experts_per_tok=2, rope_parameters=PLAIN_ROPE)
    path = write_model(config, tmp_path / "quantized", 0)
    weights, quantized = load_file(f"{path}/model.safetensors"), {}
    generator = torch.Generator().manual_seed(0)
    for name, weight in weights.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            size = (len(weight), weight.shape[2], weight.shape[1] // 32)
            quantized[f"{name}_blocks"] = torch.randint(256, (*size, 16), generator=generator, dtype=torch.uint8)
            quantized[f"{name}_scales"] = torch.full(size, 124, dtype=torch.uint8)
        else:
            quantized[name] = weight.bfloat16()
    save_file(quantized, f"{path}/model.safetensors", metadata={"format": "pt"})
    config.quantization_config = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    }
    config.save_pretrained(path)
    dequantized = load_model(path, dtype=torch.bfloat16).module
    copied = AutoModelForCausalLM.from_pretrained(
        path, dtype="bfloat16", quantization_config=Mxfp4Config(dequantize=True)
    )
    copied.save_pretrained(tmp_path / "copy", save_original_format=False)
    AutoTokenizer.from_pretrained(path).save_pretrained(tmp_path / "copy")
    loaded = load_model(str(tmp_path / "copy"), dtype=torch.bfloat16).module
    for name, weight in copied.named_parameters():
        assert torch.equal(loaded.get_parameter(name), weight)
        assert torch.equal(dequantized.get_parameter(name), weight)
    copied.save_pretrained(tmp_path / "wrong")
    AutoTokenizer.from_pretrained(path).save_pretrained(tmp_path / "wrong")
    with pytest.raises(ModelLoadError, match=r"has no weights for .*experts"):
        load_model(str(tmp_path / "wrong"))


def test_experts_that_are_none_of_the_interface_are_sampled_from_but_not_trained(
    service: ServiceClient, tmp_path: Path
) -> None:
    config = JetMoeConfig(**{**SHAPE, "num_key_value_heads": 2, "kv_channels": 8}, num_local_experts=4)
    path = write_model(config, tmp_path, 0)
    with pytest.raises(ModelLoadError, match="jetmoe"):
        service.create_lora_training_client(path, 4, train_mlp=False).result()


def test_sampling_and_scoring_agree_while_other_requests_come_and_go(
    service: ServiceClient, paths: dict[str, str]
) -> None:
    sampler = service.create_sampling_client(base_model=paths["qwen2-moe"]).result()
    tokens = random_tokens(12, 2)
    others = [sampler.sample(prompt(random_tokens(n, n)), 2, params(n, stop=[])) for n in (3, 9, 17)]
    (sequence,) = sampler.sample(prompt(tokens), 1, params(20, stop=[], seed=5)).result().sequences
    for other in others:
        other.result()
    scored = sampler.compute_logprobs(prompt([*tokens, *sequence.tokens])).result()[len(tokens) :]
    torch.testing.assert_close(torch.tensor(sequence.logprobs), torch.tensor(scored), atol=here_bound(), rtol=0)


def attention_with_sinks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor, scale: float, window: int | None
) -> torch.Tensor:
    """(H, S, D) of the last S of T positions, written out: one more score in each row, which has no value."""
    k, v = (tensor.repeat_interleave(len(q) // len(tensor), dim=0) for tensor in (k, v))
    keys, own = torch.arange(k.shape[1]), torch.arange(k.shape[1] - q.shape[1], k.shape[1])[:, None]
    seen = keys <= own if window is None else (keys <= own) & (keys > own - window)
    scores = (q @ k.transpose(1, 2) * scale).masked_fill(~seen, -torch.inf)
    scores = torch.cat([scores, sinks[:, None, None].expand(-1, q.shape[1], 1)], dim=2)
    return scores.softmax(-1)[..., :-1] @ v


@pytest.mark.parametrize("window", [None, 4])
def test_packed_attention_with_sinks_and_its_gradients(window: int | None) -> None:
    """Sequences of one length together, one that is alone, and two that share a prefix."""
    heads, kv_heads, dim, scale = 4, 2, 6, 0.4
    segments = [
        Segment(0, 5),
        Segment(5, 10),
        Segment(10, 17),
        Segment(17, 20, 7, (10, 17)),
        Segment(20, 26, 7, (10, 17)),
    ]
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, h, 26, dim, generator=generator, dtype=torch.float64).requires_grad_()
        for h in (heads, kv_heads, kv_heads)
    )
    sinks = torch.linspace(-2, 3, heads, dtype=torch.float64)
    found = PackedPlan(segments).attend(LayerAttention(0, scale, None, window, sinks), q, k, v)
    parts = []
    for segment in segments:
        rows = [*range(*(segment.prefix or (0, 0))), *range(segment.start, segment.end)]
        own = q[0, :, segment.start : segment.end]
        parts.append(attention_with_sinks(own, k[0, :, rows], v[0, :, rows], sinks, scale, window))
    expected = torch.cat(parts, dim=1).transpose(0, 1)[None]
    gradient = torch.linspace(-1, 1, expected.numel(), dtype=torch.float64).view(expected.shape)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(
        torch.autograd.grad(found, (q, k, v), gradient), torch.autograd.grad(expected, (q, k, v), gradient), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)
