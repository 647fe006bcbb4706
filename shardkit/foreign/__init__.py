"""Configs of other tools: Accelerate, DeepSpeed, transformers' Trainer. Read, checked and written, never executed."""
