"""Speaks as vllm_worker.py does, without vLLM: every token is the one after the prompt's last, plus one each time.

STAND_IN is a JSON file: {"probe": [token, logprob, tempered logprob, limited logprob], "log": file, ...}. What it is sent is
appended to the log, after a line with its process id. What a prompt begins with says what becomes of it.
"""

import json
import os
import sys

SILENT, DEADLY, REFUSED, NOT_A_NUMBER, SHORT, CHATTY = 7, 8, 9, 10, 11, 12
"""First tokens of a prompt: never answered; ends the process; refused; a logprob that is NaN; ends before its time; is
answered with something else than JSON."""

LOGPROB = -1.25


def answer(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


def complete(order: dict) -> None:
    prompt, number = order["prompt"], order["number"]
    topk = order["topk"]
    tokens = [prompt[-1] + 1 + i for i in range(order["max_tokens"])]
    if prompt[0] == SHORT:
        tokens = tokens[:1]
    for i, token in enumerate(tokens):
        stops = token in order["stop"]
        ended = "stop" if stops else "length" if i == len(tokens) - 1 else None
        logprob = float("nan") if prompt[0] == NOT_A_NUMBER else LOGPROB
        table = [[[token, LOGPROB], *([900 + k, -2.0 - k] for k in range(topk))]] if topk else None
        answer(tokens=[[number, [token], [logprob], table, 3, ended]])
        if stops:
            return


def probe(order: dict, values: list) -> None:
    token, plain, tempered, limited = values
    logprob = plain if order["temperature"] == 1 else tempered if order["top_k"] < 0 else limited
    answer(tokens=[[order["number"], [token], [logprob], [[[token, logprob]]], 0, "length"]])


def main() -> None:
    with open(os.environ["STAND_IN"]) as file:
        plan = json.load(file)
    if "fatal" in plan:
        sys.stdin.readline()
        answer(fatal=plan["fatal"])
        sys.exit(1)
    with open(plan["log"], "a") as log:
        log.write(json.dumps({"pid": os.getpid()}) + "\n")
        for line in sys.stdin:
            log.write(line)
            log.flush()
            command = json.loads(line)
            if "model" in command:
                answer(ready={"version": "0", "max_model_len": plan.get("max_model_len", command["max_model_len"])})
            elif command["op"] == "add" and command["number"] < 0:
                probe(command, plan["probe"])
            elif command["op"] == "sleep":
                if plan.get("dies_at_sleep"):
                    sys.exit(3)
                answer(asleep=True)
            elif command["op"] == "add":
                kind = command["prompt"][0]
                if kind == DEADLY:
                    print("the roof fell in", file=sys.stderr, flush=True)
                    os._exit(3)
                if kind == REFUSED:
                    answer(failed=command["number"], error="ValueError: no such adapter layout")
                elif kind == CHATTY:
                    print("vLLM says hello", flush=True)
                elif kind != SILENT:
                    complete(command)


if __name__ == "__main__":
    main()
