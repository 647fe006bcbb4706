"""A process that tokenises pieces. It reads a recipe, then pieces, and answers each piece with a line of JSON.

The tokens are too large for a pipe: they go to a file in the parent's folder.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import numpy as np

from ...errors import ShardkitError
from .encode import Encoder, encode_piece


def work(orders: IO[bytes], answers: IO[bytes]) -> None:
    """Answer orders until their stream ends, which it does when the parent ends."""
    recipe, scratch = pickle.load(orders)
    encoder: Encoder | None = None
    while True:
        try:
            number, piece = pickle.load(orders)
        except EOFError:
            return
        try:
            encoder = encoder or Encoder(recipe)
            encoded, report = encode_piece(encoder, piece)
            arrays: dict[str, Any] = {"tokens": encoded.tokens, "lengths": encoded.lengths, "places": encoded.places}
            if encoded.is_target is not None:
                arrays["is_target"] = encoded.is_target
            np.savez(Path(scratch) / f"{number}.npz", **arrays)
            answer = asdict(report)
        except ShardkitError as error:
            answer = {"error": [error.cause, error.fix]}
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()


if __name__ == "__main__":
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a library that prints must not break an answer
    work(sys.stdin.buffer, answers)
