"""Renderer variants of one model: thinking on or off, reasoning effort, keeping earlier reasoning, tools.

A request selects a variant (`reasoning_effort`, `chat_template_kwargs`), as it would by the variables of a chat template.
"""

from collections.abc import Mapping, Sequence

ON, OFF, KEEP, FORGET, TOOLS = "on", "off", "keep", "forget", "tools"
EFFORTS = ("minimal", "low", "medium", "high", "xhigh", "max")

_FAMILIES: tuple[Mapping[str, str], ...] = (
    {ON: "qwen3", OFF: "qwen3_disable_thinking"},
    {ON: "qwen3_5", OFF: "qwen3_5_disable_thinking", KEEP: "qwen3_5_preserve_thinking"},
    {
        ON: "qwen3_8_xhigh_reasoning",
        OFF: "qwen3_8_disable_thinking",
        **{effort: f"qwen3_8_{effort}_reasoning" for effort in ("low", "medium", "xhigh")},
    },
    {ON: "deepseekv3_thinking", OFF: "deepseekv3_disable_thinking"},
    {
        ON: "deepseekv4_1",
        OFF: "deepseekv4_1_disable_thinking",
        KEEP: "deepseekv4_1_preserve_thinking",
        "low": "deepseekv4_1_low_reasoning",
        "high": "deepseekv4_1",
        "max": "deepseekv4_1_max_reasoning",
    },
    {ON: "glm5_3_max_reasoning", **{effort: f"glm5_3_{effort}_reasoning" for effort in ("low", "high", "max")}},
    {ON: "kimi_k2"},
    {ON: "kimi_k25", OFF: "kimi_k25_disable_thinking"},
    {ON: "kimi_k26", OFF: "kimi_k26_disable_thinking", KEEP: "kimi_k26_preserve_thinking"},
    {
        ON: "kimi_k31_pro_max_reasoning",
        OFF: "kimi_k31_pro_disable_thinking",
        **{effort: f"kimi_k31_pro_{effort}_reasoning" for effort in ("low", "high", "max")},
    },
    {
        ON: "nemotron3",
        OFF: "nemotron3_disable_thinking",
        KEEP: "nemotron3_preserve_thinking",
        "low": "nemotron3_low_thinking",
    },
    {
        ON: "nemotron3_ultra",
        OFF: "nemotron3_ultra_disable_thinking",
        KEEP: "nemotron3_ultra_preserve_thinking",
        "medium": "nemotron3_ultra_medium_thinking",
    },
    {ON: "gpt_oss_no_sysprompt", **{effort: f"gpt_oss_{effort}_reasoning" for effort in ("low", "medium", "high")}},
    {ON: "qwen3_vl"},
    {OFF: "llama3", TOOLS: "llama3_tools"},
    *({OFF: name} for name in ("qwen3_instruct", "qwen3_vl_instruct", "qwen2_5", "mistral", "mistral_v3", "gemma")),
    {OFF: "role_colon"},
)
"""Option -> renderer, one row per family. A family that never thinks only has OFF."""

_SAME = {
    "deepseekv3": "deepseekv3_disable_thinking",
    "kimi_k31_pro_no_reasoning_effort": "kimi_k31_pro_max_reasoning",
    "llama3_tools": "llama3",
}
"""Renderers that no option selects -> a member of their family."""

_KEEPING = ("qwen3_8_", "glm5_3_", "kimi_k31_pro_")
"""Prefixes of renderers that always keep the reasoning of earlier answers."""

_SWITCHES = ("enable_thinking", "thinking")
_OPTIONS = (*_SWITCHES, "preserve_thinking", "reasoning_effort")


def variant(
    name: str,
    reasoning_effort: str | None,
    options: Mapping[str, bool | str],
    with_tools: bool,
    offered: Sequence[str] = (),
) -> str:
    """The variant of a renderer that a request selects.

    Args:
        name: the model's renderer.
        reasoning_effort: none, minimal, low, medium, high, xhigh or max; None: not given.
        options: chat_template_kwargs of the request.
        with_tools: whether the request declares tools.
        offered: the names that fit the model; empty if unknown.

    Raises ValueError, naming the field, if there is no such variant.
    """
    family = _family(name)
    if offered and name in offered:
        family = {asked: other for asked, other in family.items() if other in offered}
    for field, asked in _asked(reasoning_effort, options).items():
        if _does(name, asked, family):
            continue
        if asked == FORGET and name == family.get(KEEP):
            asked = ON
        if asked not in family:
            known = [wanted for wanted in (*EFFORTS, ON, OFF, KEEP) if wanted in family]
            has = f"it has {', '.join(map(_spelled, known))}" if known else "it has no variants"
            raise ValueError(f"{field}: the renderer {name!r} has no variant for {_spelled(asked)}; {has}")
        name = family[asked]
    return family[TOOLS] if with_tools and TOOLS in family else name


def _family(name: str) -> Mapping[str, str]:
    listed = _SAME.get(name, name)
    return next((family for family in _FAMILIES if listed in family.values()), dict[str, str]())


def _thinks(name: str, family: Mapping[str, str]) -> bool:
    return name not in (family.get(OFF), family.get(TOOLS)) and _SAME.get(name) != family.get(OFF)


def _does(name: str, asked: str, family: Mapping[str, str]) -> bool:
    """Whether a renderer already has the requested option."""
    if asked == ON:
        return _thinks(name, family)
    keeps = name == family.get(KEEP) or name.startswith(_KEEPING)
    return keeps if asked == KEEP else asked == FORGET and not keeps


def _spelled(asked: str) -> str:
    """An option as a request writes it."""
    switches = {ON: ("enable_thinking", "true"), OFF: ("enable_thinking", "false")}
    switches |= {KEEP: ("preserve_thinking", "true"), FORGET: ("preserve_thinking", "false")}
    return "=".join(switches.get(asked, ("reasoning_effort", asked)))


def _asked(reasoning_effort: str | None, options: Mapping[str, bool | str]) -> dict[str, str]:
    """Field -> requested option, thinking switches first. Raises ValueError for contradictions."""
    if unknown := sorted(options.keys() - set(_OPTIONS)):
        raise ValueError(
            f"chat_template_kwargs.{unknown[0]:.100} is not an option of this model's renderer; there are {', '.join(_OPTIONS)}"
        )
    asked: dict[str, str] = {}
    for field in (*_SWITCHES, "preserve_thinking"):
        if field in options:
            if not isinstance(options[field], bool):
                raise ValueError(f"chat_template_kwargs.{field}={options[field]!r:.100} must be true or false")
            yes, no = (KEEP, FORGET) if field == "preserve_thinking" else (ON, OFF)
            asked[f"chat_template_kwargs.{field}"] = yes if options[field] else no
    for field, effort in (
        ("chat_template_kwargs.reasoning_effort", options.get("reasoning_effort")),
        ("reasoning_effort", reasoning_effort),
    ):
        if effort is not None:
            if effort not in ("none", *EFFORTS):
                raise ValueError(f"{field}={effort!r:.100} is unknown; choose none, {', '.join(EFFORTS)}")
            asked[field] = OFF if effort == "none" else str(effort)
    wanted = set(asked.values()) - {ON, FORGET}
    if len(wanted) > 1 or (OFF in wanted and ON in asked.values()):
        raise ValueError(f"{' and '.join(asked)} contradict each other; leave out all but one")
    return asked
