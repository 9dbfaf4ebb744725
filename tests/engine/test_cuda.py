from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny_stage import GREEDY, Request, TinyStage, make_runner, prompt, run

from aura_omni.engine.sequence import MediaSpan
from aura_omni.flow import Sampling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SEEDED = Sampling(max_tokens=12, temperature=0.9, top_k=20, top_p=0.95, repetition_penalty=1.1, seed=3)


@pytest.mark.parametrize("mrope", [False, True])
def test_requests_on_the_device_say_what_dense_attention_says_on_the_cpu(mrope: bool) -> None:
    samplings = [replace(GREEDY, max_tokens=12), replace(SEEDED, repetition_penalty=1.0)]
    requests = [
        Request(prompt(5 + 6 * index, seed=index), samplings[index % 2], media=(MediaSpan(2, 3, bytes([index])),))
        for index in range(8)
    ]
    want = [TinyStage(mrope=mrope).dense_outputs(request.sequence) for request in requests]
    run(make_runner(TinyStage(mrope=mrope, device="cuda"), max_num_batched_tokens=24), *requests)
    assert [request.heard for request in requests] == want


def test_penalties_on_the_device_equal_those_on_the_cpu() -> None:
    heard = []
    for device in ("cpu", "cuda"):
        request = Request(prompt(9), SEEDED)
        run(make_runner(TinyStage(device=device)), request)
        heard.append(request.heard)
    assert heard[0] == heard[1]


def test_bfloat16_pages_hold_what_they_are_given() -> None:
    stage = TinyStage(device="cuda", dtype=torch.bfloat16)
    request = Request(prompt(30), GREEDY)
    exact = Request(prompt(30), GREEDY)
    run(make_runner(stage), request)
    run(make_runner(TinyStage()), exact)
    assert request.reason == "length"
    assert request.heard[0] == exact.heard[0]
