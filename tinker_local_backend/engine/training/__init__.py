"""From datums to an optimizer step."""
