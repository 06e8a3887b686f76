"""Gradients to new parameters: what a step changes when it is applied."""
