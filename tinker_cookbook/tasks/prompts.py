"""System prompts of the shipped tasks. The answer always stands between <SOLUTION> tags, which `tasks.types` reads."""

QA_SYSTEM = "Answer the question. Put only the final answer between <SOLUTION> and </SOLUTION>."

SUMMARY_SYSTEM = (
    "Summarise the article in one or two sentences. Put only the summary between <SOLUTION> and </SOLUTION>."
)
