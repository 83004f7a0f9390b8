"""Runs under vLLM's own Python, which has none of this project's packages. Reads and writes lines of JSON.

The first line describes the work and is answered by {"version": ...}; every further line {"lora": bool, "prompts": [...]}
runs it once, on prompts of the same lengths, and is answered by {"tokens": int}. Ends with its input. Requests have no seed,
because with seeds vLLM would need a separate generator per row.
"""

import importlib
import json
import os
import sys


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM's prints go to the log

    def answer(value: dict) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    work = json.loads(sys.stdin.readline())

    vllm, lora_request = importlib.import_module("vllm"), importlib.import_module("vllm.lora.request")
    rows = len(work["prompts"]) * work["group_size"]
    engine = vllm.LLM(
        model=work["model"],
        dtype=work["dtype"],
        max_model_len=max(map(len, work["prompts"])) + work["max_new_tokens"],
        max_num_seqs=rows,
        enforce_eager=not work["on_gpu"],
        enable_lora=True,
        max_loras=2,  # one more than the adapters: if all slots are used, rows of the base model get a wrong adapter
        max_lora_rank=max(8, work["rank"]),
        gpu_memory_utilization=0.4 if work["on_gpu"] else 0.2,  # the engine has the rest
        logprobs_mode="processed_logprobs",
    )
    adapter = lora_request.LoRARequest("benchmark", 1, work["adapter"])
    answer({"version": vllm.__version__})
    for line in sys.stdin:
        command = json.loads(line)
        params = vllm.SamplingParams(
            n=work["group_size"],
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            max_tokens=work["max_new_tokens"],
            stop_token_ids=work["stops"],
            ignore_eos=True,
            logprobs=0,  # only that of the sampled token
            detokenize=False,
        )
        prompts = [{"prompt_token_ids": prompt} for prompt in command["prompts"]]
        lora = adapter if command["lora"] else None
        outputs = engine.generate(prompts, params, lora_request=lora, use_tqdm=False)
        completions = [completion for output in outputs for completion in output.outputs]
        assert len(completions) == rows and all(len(c.logprobs) == len(c.token_ids) for c in completions)
        answer({"tokens": sum(len(c.token_ids) for c in completions)})


if __name__ == "__main__":
    main()
