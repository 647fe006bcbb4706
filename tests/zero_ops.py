"""Ops of DeepSpeed that tests must not compile; loops that are not shardkit's meet them."""

from __future__ import annotations


def leave_out_shm() -> None:
    """Leave out its shared-memory collectives: they take minutes to compile, and a killed build blocks all later ones.

    shardkit's own engine does the same (`shardkit.strategies.zero.engine`).
    """
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
