"""The planning process, which `client` starts: reads configs from one pipe and writes estimates to another."""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from typing import Any

from ..config.libraries import NameGone
from ..config.schema import RunConfig
from ..errors import ShardkitError


def main(read_fd: int, write_fd: int, fakes: str) -> None:
    """Answer requests until the pipe ends. Each request is one line: first the target, then configs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the client, which then ends this process
    with os.fdopen(read_fd, encoding="utf-8") as requests, os.fdopen(write_fd, "w", encoding="utf-8") as answers:

        def answer(reply: dict[str, Any]) -> None:
            answers.write(json.dumps(reply) + "\n")
            answers.flush()

        from .model.predict import has_first_look, is_slow, predict, prepare, ranks_alike
        from .simulate.unplannable import Untraceable, explained
        from .target import Target

        target = Target.from_json(json.loads(requests.readline()))
        try:
            answer({"ready": (method := prepare(target, fakes))})
        except NameGone as error:
            answer({"error": [type(error).__name__, error.cause, error.fix]})
            return
        for line in requests:
            request = json.loads(line)
            config = RunConfig.model_validate(request["config"])
            try:
                with explained():
                    looks = {"": None, "good": has_first_look, "any": is_slow}[request["look"]]
                    if looks is not None and not looks(config):
                        answer({"estimate": None})
                        continue
                    estimate = predict(config, target, method, **request["how"])
                    alike = ranks_alike(config, target.world_size, estimate.n_params)
                    answer({"estimate": estimate.to_json(), "alike": alike})
            except ShardkitError as error:
                reply = [type(error).__name__, error.cause, error.fix]
                answer({"error": reply, "trace": traceback.format_exc(), "over": isinstance(error, Untraceable)})
                if isinstance(error, Untraceable):
                    return  # state left behind by the failed trace could make later answers wrong


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
