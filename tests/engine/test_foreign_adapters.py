"""Hosted adapters and those of one expert at a time, against weights that are changed by hand; merging and importing them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, GptOssConfig, PretrainedConfig, Qwen3MoeConfig

from tests.engine.conftest import SHAPE, write_model
from tests.engine.devices import here
from tests.engine.helpers import cross_entropy_datum, gradients, make_training_client, prompt, random_tokens
from tests.engine.test_checkpoints import folder as folder_of
from tests.engine.test_expert_lora import LAYOUTS, make_adapter
from tests.engine.test_experts import KINDS, make_experts
from tinker_local_backend import CheckpointError, ServiceClient
from tinker_local_backend.engine.model.lora_spec import ExpertLayout
from tinker_local_backend.engine.model.stacked_experts import from_stacked, one_by_one, stacked_of, to_stacked
from tinker_local_backend.import_adapter import import_adapter
from tinker_local_backend.merge import merge_adapter
from tinker_local_backend.storage.foreign_adapters import convert_adapter, is_foreign, read_adapter

pytestmark = pytest.mark.skipif(not here().is_reference, reason="files alone")

EXPERTS, INNER, RANK, ALPHA = 4, 16, 3, 6.0
PREFIX = "base_model.model.model.layers.1."
CONFIGS: dict[str, PretrainedConfig] = {
    "qwen3_moe": Qwen3MoeConfig(**SHAPE, num_experts=EXPERTS, num_experts_per_tok=2, moe_intermediate_size=INNER),
    "gpt_oss": GptOssConfig(**{**SHAPE, "intermediate_size": INNER}, num_local_experts=EXPERTS, num_experts_per_tok=2),
    "deepseek_v3": DeepseekV3Config(
        **{**SHAPE, "num_key_value_heads": 4, "head_dim": None},
        n_routed_experts=EXPERTS,
        num_experts_per_tok=2,
        moe_intermediate_size=INNER,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=6,
    ),
}
TOKENS = torch.tensor([random_tokens(24, 0)])


@pytest.fixture(scope="module", params=CONFIGS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(kind: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(CONFIGS[kind], tmp_path_factory.mktemp(kind), seed=1)


def plain(path: str | Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, experts_implementation="eager").eval()


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(TOKENS).logits[0]


def hosted(kind: str, shared: bool = True) -> dict[str, torch.Tensor]:
    """Tensors as the hosted service names them: experts of one layer, o_proj and the head."""
    generator = torch.Generator().manual_seed(7)
    attention = "attn" if kind == "gpt_oss" else "self_attn"
    inputs = 4 * 6 if kind == "deepseek_v3" else 4 * 8
    outer = 1 if shared else EXPERTS
    shapes = {
        f"{PREFIX}mlp.experts.w1": ((outer, RANK, 32), (EXPERTS, INNER, RANK)),
        f"{PREFIX}mlp.experts.w2": ((EXPERTS, RANK, INNER), (outer, 32, RANK)),
        f"{PREFIX}mlp.experts.w3": ((outer, RANK, 32), (EXPERTS, INNER, RANK)),
        f"{PREFIX}{attention}.o_proj": ((RANK, inputs), (32, RANK)),
        "base_model.model.model.unembed_tokens": ((RANK, 32), (1536, RANK)),
    }
    return {
        f"{name}.lora_{factor}.weight": 0.3 * torch.randn(shape, generator=generator)
        for name, both in shapes.items()
        for factor, shape in zip("AB", both, strict=True)
    }


def write(folder: Path, tensors: dict[str, torch.Tensor], alpha: float = ALPHA) -> Path:
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"r": RANK, "lora_alpha": alpha}))
    return folder


@torch.no_grad()
def by_hand(kind: str, model: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Logits of the model whose weights have B @ A added."""
    changed = plain(model)
    layer, scale = changed.model.layers[1], ALPHA / RANK

    def delta(name: str) -> torch.Tensor:
        return scale * tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"]

    gate, down, up = (delta(f"{PREFIX}mlp.experts.w{i}") for i in (1, 2, 3))
    experts = layer.mlp.experts
    if kind == "gpt_oss":  # transposed, gate and up in turns
        experts.gate_up_proj[:, :, 0::2] += gate.transpose(1, 2)
        experts.gate_up_proj[:, :, 1::2] += up.transpose(1, 2)
        experts.down_proj += down.transpose(1, 2)
    else:
        experts.gate_up_proj[:, :INNER] += gate
        experts.gate_up_proj[:, INNER:] += up
        experts.down_proj += down
    layer.self_attn.o_proj.weight += delta(f"{PREFIX}{'attn' if kind == 'gpt_oss' else 'self_attn'}.o_proj")
    changed.lm_head.weight = torch.nn.Parameter(changed.lm_head.weight + delta("base_model.model.model.unembed_tokens"))
    return logits(changed)


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "apart"])
def test_peft_and_a_merged_model_compute_what_a_hosted_file_means(
    kind: str, model: str, shared: bool, tmp_path: Path
) -> None:
    tensors = hosted(kind, shared)
    folder = write(tmp_path / "hosted", tensors)
    expected = by_hand(kind, model, tensors)
    assert (expected - logits(plain(model))).abs().max() > 0.1
    assert is_foreign(folder)
    convert_adapter(folder, tmp_path / "peft", model)
    assert not is_foreign(tmp_path / "peft")
    found = logits(PeftModel.from_pretrained(plain(model), str(tmp_path / "peft")))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    result = merge_adapter(str(folder), tmp_path / "merged", base_model=model)
    assert result.modules == 4
    torch.testing.assert_close(logits(plain(tmp_path / "merged")), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "foreign"),
    [
        ("base_model.model.lm_head", False),
        ("base_model.model.transformer.h.0.attn.c_attn", False),
        ("base_model.model.model.layers.0.mlp.experts.base_layer", False),
        ("base_model.model.model.lm_head", True),
        ("base_model.model.model.layers.0.attn.q_proj", True),
        ("base_model.model.model.layers.0.mlp.experts.w2", True),
    ],
)
def test_names_tell_where_an_adapter_comes_from(name: str, foreign: bool, tmp_path: Path) -> None:
    folder = write(tmp_path / "adapter", {f"{name}.lora_A.weight": torch.ones(RANK, 4)})
    assert is_foreign(folder) == foreign


def test_what_vllm_reads_is_read_back(kind: str, model: str, tmp_path: Path) -> None:
    tensors = hosted(kind)
    folder = write(tmp_path / "hosted", tensors)
    convert_adapter(folder, tmp_path / "vllm", model, for_vllm=True)
    names = set(load_file(tmp_path / "vllm" / "adapter_model.safetensors"))
    one = f"{PREFIX}mlp.experts.2.gate_proj.lora_A.weight"
    assert (one in names) == (kind != "gpt_oss")
    assert (f"{PREFIX}mlp.experts.base_layer.lora_A.weight" in names) == (kind == "gpt_oss")
    ours, again = read_adapter(folder, model), read_adapter(tmp_path / "vllm", model)
    assert ours.spec == again.spec and ours.spec.experts == "shared_outer"
    for one_table, other in ((ours.a, again.a), (ours.b, again.b)):
        assert one_table.keys() == other.keys()
        assert all(torch.equal(one_table[name], other[name]) for name in one_table)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_own_adapters_merge_and_come_back_from_what_vllm_reads(
    kind: str, model: str, layout: ExpertLayout, service: ServiceClient, home: Path, tmp_path: Path
) -> None:
    client = make_training_client(service, model, expert_lora=layout)
    saved = client.save_weights_for_sampler(f"own-{kind}-{layout}").result().path
    tokens = TOKENS[0].tolist()
    expected = torch.tensor(
        service.create_sampling_client(saved).result().compute_logprobs(prompt(tokens)).result()[1:]
    )
    merge_adapter(saved, tmp_path / "merged", home=home)
    scores = logits(plain(tmp_path / "merged")).log_softmax(-1)[:-1].gather(1, TOKENS[0, 1:, None])[:, 0]
    torch.testing.assert_close(scores, expected, rtol=0, atol=2e-5)
    convert_adapter(folder_of(home, saved), tmp_path / "vllm", model, for_vllm=True)
    _, sampler = import_adapter(tmp_path / "vllm", model, home=home)
    again = service.create_sampling_client(sampler).result().compute_logprobs(prompt(tokens)).result()
    assert again[1:] == expected.tolist()


def test_a_hosted_adapter_trains_further(
    kind: str, model: str, service: ServiceClient, home: Path, tmp_path: Path
) -> None:
    """One of everything, as hosted ones are, under its hosted names."""
    client = make_training_client(service, model, rank=RANK, expert_lora="shared_outer")
    adapter = client._run.state.adapter
    stacked = to_stacked(adapter.experts, (adapter.a, adapter.b))
    linears = {name: t for name, t in adapter.named_parameters() if ".experts." not in name}
    attention = "attn" if kind == "gpt_oss" else "self_attn"
    tensors = {
        "base_model.model."
        + name.replace("self_attn", attention).replace("lm_head", "model.unembed_tokens"): t.detach()
        for name, t in {**linears, **stacked}.items()
    }
    folder = write(tmp_path / "hosted", {name: t.contiguous() for name, t in tensors.items()}, alpha=32.0)
    state, sampler = import_adapter(folder, model, home=home)
    data = [cross_entropy_datum(12, 3)]
    expected = client.forward_backward(data, "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist()
    again = service.create_training_client_from_state(state).result()
    assert again._run.state.adapter.spec == adapter.spec
    found = again.forward_backward(data, "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist()
    assert found == expected and gradients(again)
    assert service.create_sampling_client(sampler).result().get_base_model() == model


def test_an_adapter_on_a_part_of_the_layers_is_merged_and_not_trained(
    kind: str, model: str, home: Path, tmp_path: Path
) -> None:
    folder = write(tmp_path / "hosted", hosted(kind))
    with pytest.raises(CheckpointError, match=r"cannot be trained further here: .*tinker_local_backend\.merge"):
        import_adapter(folder, model, home=home)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("experts", KINDS)
def test_every_form_gives_the_same_bits_back(experts: str, layout: ExpertLayout) -> None:
    adapter = make_adapter(make_experts(experts, "eager"), layout, seed=4)
    tables = ({k: t.detach() for k, t in one.items()} for one in (adapter.a, adapter.b))
    a, b = tables
    for form in (to_stacked(adapter.experts, (a, b)), one_by_one(adapter.experts, (a, b))):
        stacked = stacked_of(form, adapter.experts)
        assert stacked is not None
        for table, found in zip((a, b), from_stacked(adapter.experts, 3, stacked), strict=True):
            assert table.keys() == found.keys() and all(torch.equal(table[name], found[name]) for name in table)


FAULTS: dict[str, tuple[Any, str]] = {
    "an expert too many": (
        lambda t: t.update({f"{PREFIX}mlp.experts.w1.lora_B.weight": torch.zeros(EXPERTS + 1, INNER, RANK)}),
        "w1.lora_B.weight has 5 experts, the model has 4",
    ),
    "another width": (
        lambda t: t.update({f"{PREFIX}mlp.experts.w2.lora_A.weight": torch.zeros(EXPERTS, RANK, INNER + 1)}),
        r"w2.lora_A.weight has the shape \(4, 3, 17\), expected \(4, 3, 16\)",
    ),
    "no up": (lambda t: t.pop(f"{PREFIX}mlp.experts.w3.lora_A.weight"), "w3.lora_A.weight is missing"),
    "a linear divided": (
        lambda t: t.update({f"{PREFIX}self_attn.in_proj_q.lora_A.weight": torch.zeros(RANK, 32)}),
        "in_proj_q, which is neither a linear nor experts",
    ),
    "half": (lambda t: t.pop("base_model.model.model.unembed_tokens.lora_A.weight"), "lacks a factor of lm_head"),
    "a norm": (lambda t: t.update({f"{PREFIX}norm.weight": torch.zeros(32)}), "not a LoRA matrix"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_does_not_fit_is_refused_by_name(fault: str, tmp_path: Path) -> None:
    model = write_model(CONFIGS["qwen3_moe"], tmp_path / "model", seed=1)
    change, message = FAULTS[fault]
    tensors = hosted("qwen3_moe")
    change(tensors)
    with pytest.raises(CheckpointError, match=message):
        read_adapter(write(tmp_path / "hosted", tensors), model)
