"""Whether sampled logprobs are those of a teacher-forced pass, by the flags of the earlier script: see `recipes.flags`.

python3 -u scripts/check_local_sampling_logprobs.py --max-tokens 32 --prompt "What is 7 * 8?"
"""

from recipes.flags import run_check_logprobs

if __name__ == "__main__":
    run_check_logprobs()
