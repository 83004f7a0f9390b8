"""Training: from datums to losses, gradients and optimizer steps."""
