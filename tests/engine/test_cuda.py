"""On a GPU: our kernels against the plain code they stand for, and steps replayed from graphs against steps as written."""

import dataclasses
import gc
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_stage import GREEDY, SAMPLINGS, Request, TinyStage, make_runner, prompt, requests_of, run

from aura_omni.engine.engine import Engine
from aura_omni.engine.graphs import Graphed, GraphPool
from aura_omni.engine.lane import Lane
from aura_omni.engine.runner import ArRunner
from aura_omni.engine.sampler import Draw, Filters, pick
from aura_omni.engine.seats import Seats, Taker
from aura_omni.flow import Sampling
from aura_omni.models.layers import DenseKV, RMSNorm, Rope, rotate
from aura_omni.models.qwen3 import Decoder, DecoderConfig
from aura_omni.models.qwen3_vl import VisionConfig, VisionMLP

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_layers_equal_the_plain_ones(dtype):
    from aura_omni.models import fused

    torch.manual_seed(0)
    limit = 2e-6 if dtype == torch.float32 else 0.04  # one unit in the last place at most, here and there
    x = torch.randn(37, 2_048, device="cuda").to(dtype)
    norm = RMSNorm(2_048, 1e-6).cuda().to(dtype)
    norm.weight.data.uniform_(0.5, 1.5)
    assert (fused.rms_norm(x, norm.weight, 1e-6) - norm(x)).abs().max() <= limit
    q_norm, k_norm = (RMSNorm(128, 1e-6).cuda().to(dtype) for _ in range(2))
    more = torch.randn(37, 2_048, device="cuda").to(dtype)
    total, normed = fused.add_rms_norm(x, more, norm.weight, 1e-6)
    assert torch.equal(total, x + more)
    assert (normed - norm(x + more)).abs().max() <= limit
    qkv = torch.randn(37, (16 + 2 * 8) * 128, device="cuda").to(dtype)
    tables = Rope(128, 1e6).tables(torch.arange(37, device="cuda"), dtype)
    for cos, sin in (tables, [table[9:10].expand(37, -1) for table in tables]):
        q, k = fused.qk_norm_rope(qkv, q_norm.weight, k_norm.weight, cos, sin, 1e-6, heads=16, kv_heads=8)
        plain_q = rotate(q_norm(qkv[:, : 16 * 128].view(37, 16, 128)), cos, sin)
        plain_k = rotate(k_norm(qkv[:, 16 * 128 : 24 * 128].view(37, 8, 128)), cos, sin)
        assert (q - plain_q).abs().max() <= limit
        assert (k - plain_k).abs().max() <= limit
    both = torch.randn(37, 2 * 3_072, device="cuda").to(dtype)
    plain = F.silu(both[:, :3_072]) * both[:, 3_072:]
    assert (fused.silu_mul(both) - plain).abs().max() <= limit


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 16])
@pytest.mark.parametrize(("hidden", "intermediate"), [(1_024, 3_072), (2_048, 6_144)])
def test_layers_of_a_few_rows_replayed_equal_the_layers_as_written(rows, hidden, intermediate):
    """Kernels that begin before the one in front of them has ended must still see what it wrote."""
    torch.manual_seed(0)
    config = DecoderConfig(8, hidden, intermediate, 16, 8, 128, 1e-6, 1e6, 64)
    decoder = Decoder(config).to("cuda", torch.bfloat16).requires_grad_(False)
    inputs = [torch.randn(rows, hidden, device="cuda").bfloat16() for _ in range(4)]
    x, places = inputs[0].clone(), torch.zeros(rows, dtype=torch.long, device="cuda")

    def step():
        kv = DenseKV(8, rows, 1, 8, 128, dtype=torch.bfloat16, device=x.device)
        return decoder(x, places, kv)

    with torch.inference_mode():
        written = [step() for given in inputs if x.copy_(given) is x]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step()
        for _ in range(20):
            for given, wanted in zip(inputs, written, strict=True):
                x.copy_(given)
                graph.replay()
                assert torch.equal(out, wanted)
    with torch.enable_grad():  # plainly
        for given, found in zip(inputs, written, strict=True):
            x.copy_(given)
            assert (step() - found).float().abs().mean() < 0.02  # of values around 0.8; rounding alone makes it 0.006


def test_a_product_does_the_activation_of_vision_as_written():
    """The approximate GELU: the exact one is 1e-4 away."""
    torch.manual_seed(0)
    mlp = VisionMLP(VisionConfig(1, 64, 256, 4, 3, 16, 2, 2, 4, 64, ())).cuda().requires_grad_(False)
    mlp.linear_fc2 = torch.nn.Identity()
    x = torch.randn(2, 24, 64, device="cuda") * 4
    with torch.enable_grad():
        plain = mlp(x)
    with torch.inference_mode():
        torch.testing.assert_close(mlp(x), plain, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("vocabulary", [100, 2_048, 3_072])
def test_the_fused_draw_is_the_plain_one(vocabulary):
    torch.manual_seed(0)
    rows = [Sampling(temperature=t, top_k=k) for t, k in [(0.0, 0), (0.9, 50), (1.0, 0), (0.5, 5), (1.5, 10_000)] * 20]
    logits = torch.randn(len(rows), vocabulary) * 3
    seeds, steps = [7 * row for row in range(len(rows))], list(range(len(rows)))
    plain = pick(logits, Draw.of(rows, seeds, steps, torch.device("cpu")), stream=3)
    fused = pick(logits.cuda(), Draw.of(rows, seeds, steps, torch.device("cuda")), stream=3).cpu()
    # Logarithms of CPU and GPU differ in the last bit, which may turn a draw that is a tie but for that.
    assert (plain != fused).sum() <= 1


def test_a_draw_from_what_is_not_a_number_is_an_id():
    for vocabulary in (100, 3_072, 5_000):
        logits = torch.full((2, vocabulary), torch.nan, device="cuda")
        for sampling in (Sampling(temperature=0.0), Sampling(), Sampling(top_k=5)):
            draw = Draw.of([sampling, Sampling()], [0, 0], [0, 0], torch.device("cuda"))
            ids = pick(logits, draw)
            assert ((ids >= 0) & (ids < vocabulary)).all()


@pytest.mark.parametrize("vocabulary", [97, 3_072, 151_936])
def test_fused_constraints_are_the_plain_ones(vocabulary):
    samplings = [
        Sampling(),
        Sampling(logit_bias={5: 2.0, 7: -100.0}, min_tokens=4, repetition_penalty=1.3),
        Sampling(presence_penalty=0.5, frequency_penalty=0.25),
        Sampling(repetition_penalty=0.5, min_tokens=2),
    ]
    logits = torch.randn(6, vocabulary)
    logits[:, 11] = -torch.inf
    seat, step = torch.tensor([3, 0, 1, 2, 4, 4]), torch.tensor([3, 3, 3, 3, 0, 0])
    found = []
    for device in ("cpu", "cuda"):
        seats = Seats(4, hidden=8, vocabulary=vocabulary, dtype=torch.float32, device=torch.device(device))
        more = {"prompt": [1, 2, 3], "outputs": [5, 5, 6], "stop_ids": [9, 10]}
        seats.fill([Taker(number, own, inner=Sampling(), seed=1, **more) for number, own in enumerate(samplings)])
        for _ in range(3):
            seats.count(seat.to(device), torch.tensor([20, 21, 22, 23, 24, 24], device=device))
        found.append(seats.constrain(logits.to(device), seat.to(device), step.to(device)).cpu())
        for make in (seats.draw, seats.inner_draw):
            draw = make(seat.to(device), step.to(device), Filters.of(samplings))
            assert draw.floats.is_contiguous()
    torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=1e-6)
    assert torch.equal(found[1][1], logits[1])


@pytest.mark.parametrize("ended", [False, True])
def test_steps_from_graphs_equal_steps_as_written(ended):
    """Also where a kernel makes the next row."""

    def outputs(**options: Any) -> list[list[int]]:
        requests, stage = requests_of(10), TinyStage(device="cuda")
        stage.embeddings = stage.embedding if ended else None
        run(make_runner(stage, max_num_seqs=5, pages=30, max_num_batched_tokens=24, **options), *requests)
        return [request.heard for request in requests]

    written = outputs()
    assert outputs(graphs=True) == written
    assert outputs(graphs=True, usual=(SAMPLINGS[2], GREEDY)) == written
    on_cpu = requests_of(10)
    for request in on_cpu:
        run(make_runner(TinyStage()), request)
    # Sums in another order may turn a draw that is nearly a tie.
    assert sum(one.heard == other for one, other in zip(on_cpu, written, strict=True)) >= 8


def test_steps_that_fail_on_the_host_leave_the_others_as_they_were_with_graphs_too():
    alone = Request(prompt(9), dataclasses.replace(SAMPLINGS[2], seed=1))
    run(make_runner(TinyStage(device="cuda"), graphs=True), alone)
    stage = TinyStage(device="cuda")
    stage.poison, stage.not_a_number = 95, 94
    good, bad = Request(prompt(9), dataclasses.replace(SAMPLINGS[2], seed=1)), Request([1, 95, 2])
    not_finite = Request([3, 94, 5])
    run(make_runner(stage, graphs=True), good, bad, not_finite)
    assert good.heard == alone.heard
    assert bad.reason == not_finite.reason == "error"
    assert "not finite" in str(not_finite.error)


def test_two_lanes_at_once_give_what_each_gives_alone():
    def runner(seed: int) -> ArRunner:
        lane = Lane(torch.device("cuda"), urgent=seed == 0)
        return make_runner(TinyStage(seed=seed, device="cuda"), graphs=True, lane=lane)

    alone = []
    for seed in range(2):
        requests = requests_of(30)
        run(runner(seed), *requests)
        alone.append([request.heard for request in requests])
    together, runners = [requests_of(30), requests_of(30)], [runner(0), runner(1)]
    left = threading.Semaphore(0)
    for requests in together:
        for request in requests:
            request.sequence.on_end = lambda *_: left.release()
    with Engine({"first": runners[0], "second": runners[1]}) as engine:
        for one, other in zip(*together, strict=True):
            engine.post(lambda one=one: runners[0].add(one.sequence))
            engine.post(lambda other=other: runners[1].add(other.sequence))
        for _ in range(60):
            assert left.acquire(timeout=60)
        engine.check_integrity()
    assert [[request.heard for request in requests] for requests in together] == alone


@pytest.mark.parametrize("kv_eight_bits", [False, True])
def test_a_graph_step_with_positions_on_three_axes(kv_eight_bits):
    def outputs(graphs: bool) -> list[int]:
        request = Request(prompt(21), GREEDY)
        stage = TinyStage(device="cuda", mrope=True)
        run(make_runner(stage, graphs=graphs, kv_eight_bits=kv_eight_bits), request)
        return request.heard

    assert outputs(graphs=True) == outputs(graphs=False)


def test_older_graphs_that_nobody_needs_do_not_spoil_a_recording():
    def graphed(older: list[Graphed]) -> Graphed:
        def function(x: torch.Tensor) -> torch.Tensor:
            if torch.cuda.is_current_stream_capturing() and older:
                cycle: list[Any] = [older.pop()]  # as runners are
                cycle.append(cycle)
                del cycle
            return x + len([[number] for number in range(2_000)])  # more than enough to start the collector

        made = Graphed(function, rows=(torch.zeros(1, 64, device="cuda"),), sizes=(1, 2, 4), pool=GraphPool())
        made.prepare()
        return made

    assert gc.isenabled()
    with Lane(torch.device("cuda")).active(), torch.inference_mode():
        older = [graphed([]) for _ in range(3)]
        last = graphed(older)
        assert not older
        assert gc.isenabled()
        assert torch.equal(last(torch.ones(3, 64))[:3].cpu(), torch.full((3, 64), 2_001.0))
