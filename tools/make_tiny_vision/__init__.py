"""Makes the tiny vision-language model."""
