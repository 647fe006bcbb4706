"""Activation memory: recompute it in backward (`checkpoint`), or keep it in host memory (`offload`)."""

from __future__ import annotations

from .checkpoint import checkpoint_activations, offload_activations

__all__ = ["checkpoint_activations", "offload_activations"]
