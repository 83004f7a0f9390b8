"""Fenced code blocks in a reply."""


def last_code_block(text: str) -> str | None:
    """The content of the last fenced code block, None without one. An unclosed block at the end does not count."""
    pieces = text.split("```")
    if len(pieces) < 3:
        return None
    block = pieces[-2] if len(pieces) % 2 else pieces[-3]
    language, newline, code = block.partition("\n")
    return code if newline and not language.strip().count(" ") else None
