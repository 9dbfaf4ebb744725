"""The training of nano AURA: what it trains is what is served, the world keeps its word, and the scripts run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from aura_omni.engine.loader import Checkpoint
from aura_omni.flow import SILENT_TEXT, Message, Text
from aura_omni.media.video import video_of
from aura_omni.stages.aura import AuraStage
from tests.aura_tiny import PlainKV, forward, sequence_of
from training.aura import draw, speed, train, vocabulary
from training.aura.data import Maker, Plan, Room
from training.aura.dialogue import live, look
from training.aura.draw import Painter
from training.aura.export import export
from training.aura.looks import Album, Look
from training.aura.model import IGNORED, POSITIONS, SMOKE, Feeder, control_ids, network, outcome
from training.aura.probe import Case, CaseMaker, positions_read
from training.aura.questions import View, count, named
from training.aura.world import BIG, COLOURS, NAMELESS, RGB, SHAPES, Scene, Start, held_out

CPU = torch.device("cpu")
PHOTOS = np.random.default_rng(0).integers(0, 255, (2, 144, 256, 3), dtype=np.uint8)
ALBUM = Album((0.5, 0.5), ((0, 2),))


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("words")
    ids = vocabulary.write(folder)
    assert {name: ids[name] for name in control_ids()} == control_ids()
    return folder


@pytest.mark.parametrize(
    "plan", [Plan(100, 70, chunks=4), Plan(96, 64, frames=5, rounds=2), Plan(96, 64, still=True, frames=1, rounds=2)]
)
def test_the_trained_network_says_the_same_when_served(words: Path, tmp_path: Path, plan: Plan) -> None:
    made = network(3, SMOKE).half().float().eval()  # a checkpoint holds half precision
    export(made, words, tmp_path, sizes=SMOKE)
    stage = AuraStage.load(Checkpoint.find(str(tmp_path)), device=CPU, dtype=torch.float32)
    painter = Painter(PHOTOS, CPU)
    maker = Maker(words, ALBUM, seed=5)
    dialogues = []
    conversation = maker.conversation

    def kept(plan: Plan) -> object:
        dialogues.append(conversation(plan))
        return dialogues[-1]

    maker.conversation = kept  # type: ignore[method-assign, assignment]
    batch = maker.batch(plan, rows=1500, vary=False)
    with torch.no_grad():
        result = outcome(made, Feeder(painter).inputs(batch))
    frames, used = painter.frames(batch.spec, seed=batch.seed).numpy(), 0
    logits = []
    for start, stop, (dialogue, _) in zip(batch.starts, batch.starts[1:], dialogues, strict=False):
        said = [
            m
            for text, answer in dialogue.before
            for m in (Message("user", (Text(text),)), Message("assistant", (Text(answer),)))
        ]
        for done in dialogue.rounds:
            parts = []
            if done.shown is not None:
                some = frames[used : used + len(done.shown.frames)]
                used += len(some)
                parts.append(video_of(some, tuple(n / 2 for n in range(len(some))), fps=2.0, still=done.shown.still))
            said.append(Message("user", (*parts, Text(done.text))))
            said.append(Message("assistant", (Text(SILENT_TEXT if done.answer is None else done.answer),)))
        prompt = stage.prompt(said, system_prompt=dialogue.system)
        rows = np.flatnonzero(batch.weights[start:stop])
        assert list(prompt.tokens[: stop - start]) == batch.tokens[start:stop].tolist()
        sequence = sequence_of(stage, prompt)
        hidden = forward(stage, PlainKV(), (sequence, 0, sequence.length))
        logits.append(stage.logits(hidden)[rows - 1])
    assert used == len(frames)
    torch.testing.assert_close(torch.cat(logits), result.logits, atol=2e-4, rtol=0)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_rows_that_fill_a_batch_up_change_neither_loss_nor_gradient(words: Path, seed: int) -> None:
    room = Room.of(2000)
    batch = Maker(words, ALBUM, seed=seed, lesson=True).mixed(room, 0.5)
    trainer, feeder = train.Trainer(CPU, SMOKE, seed=1, rate=1e-3), Feeder(Painter(PHOTOS, CPU))
    parameters = [*trainer.made.parameters(), *trainer.tutor.parameters()]
    found = []
    for filled in (None, room):
        losses = trainer.losses(feeder.inputs(batch, filled))
        gradients = torch.autograd.grad(losses["words"] + losses["sight"], parameters)
        found.append([*losses.values(), *gradients])
    for alone, full in zip(*found, strict=True):
        torch.testing.assert_close(full, alone, rtol=1e-4, atol=1e-6)


def test_every_filled_batch_has_the_same_shapes(words: Path) -> None:
    room = Room.of(1600)
    maker, feeder = Maker(words, ALBUM, seed=4, lesson=True), Feeder(Painter(PHOTOS, CPU))
    shapes = {
        tuple((tensor.shape, tensor.dtype) for tensor in feeder.inputs(maker.mixed(room, progress), room).tensors())
        for progress in (0.0, 0.1, 0.5, 0.9)
    }
    assert len(shapes) == 1


def test_training_never_shows_or_names_a_held_out_pair() -> None:
    for seed in range(60):
        random = Random(seed)
        scene = Scene(random, 144, 256)
        for done in live(random, scene, chunks=8, ask=0.6).rounds:
            for frame in () if done.shown is None else done.shown.frames:
                assert not any(held_out(thing.colour, thing.shape) for thing in frame)
            said = f"{done.text} {done.answer or ''}".lower()
            assert not any(f"{COLOURS[c]} {SHAPES[s]}" in said for c in range(9) for s in range(8) if held_out(c, s)), (
                said
            )


def test_of_a_thing_without_a_named_colour_only_the_shape_is_asked_and_taught(words: Path) -> None:
    asked = 0
    for seed in range(40):
        random = Random(seed)
        scene = Scene(random, 144, 256, nameless=Look.choose(random, ALBUM).nameless())
        for done in look(random, scene, frames=2, still=False, card=None, rounds=6).rounds:
            asked += done.kind == "answer"
            assert done.kind == "outside" or not set(str(done.answer).rstrip(".").split()) & set(COLOURS), done
        assert all(math.dist(thing.tint, named) > 0.1 for thing in scene.things for named in RGB)
    assert asked > 100
    maker = Maker(words, ALBUM, seed=3, lesson=True)
    while True:
        batch = maker.batch(Plan(256, 144, chunks=2), rows=1)
        if (batch.spec.slots[:, 2, draw.COLOUR] == NAMELESS).all():
            break
    pictures = Feeder(Painter(PHOTOS, CPU)).inputs(batch).pictures
    assert pictures is not None
    assert (pictures.cells[3][pictures.cells[2] > 0] == IGNORED).all()


def test_each_shape_is_held_out_in_exactly_one_colour() -> None:
    assert [sum(held_out(c, s) for c in range(9)) for s in range(8)] == [1] * 8


def test_things_stay_inside_and_apart() -> None:
    for seed in range(40):
        random = Random(seed)
        scene = Scene(random, 144, 256)
        scene.populate(2)
        for _ in range(12):
            still = [thing for thing in scene.things if thing.motion is None]
            chunk = scene.step(Start(still[0].ident, "left") if still else None)
            for thing in chunk.things:
                assert thing.x - thing.radius / 256 >= -0.02
                assert thing.x + thing.radius / 256 <= 1.02
                assert thing.y - thing.radius / 144 >= -0.02
                assert thing.y + thing.radius / 144 <= 1.02


def test_what_is_counted_is_what_is_there() -> None:
    random = Random(2)
    for _ in range(200):
        scene = Scene(random, 144, 256)
        scene.populate(random.randrange(6), alike=0.6)
        view = View(tuple(scene.things), scene)
        asked = count(random, view)
        assert asked is not None
        ref = named(random, view)
        assert all(t in view.things for t in ref.found)


def test_a_drawn_shape_lies_where_its_cells_say() -> None:
    slots = np.zeros((1, 1, draw.SLOT_VALUES), np.float32)
    slots[0, 0, : draw.ON + 1] = (0, 200, 48, 30, 0, 1.0, 0, 0, 0, 1)
    ground = np.zeros((1, draw.GROUND_VALUES), np.float32)
    ground[0, draw.AFFINE], ground[0, draw.AFFINE + 4] = 1, 1
    ground[0, draw.GAIN : draw.GAIN + 3] = 1
    painter, spec = Painter(PHOTOS, CPU), draw.Spec(96, 256, slots, ground)
    red = painter.frames(spec, seed=0)[0, :, :, 0].float()
    rows, columns = (red > 128).nonzero().unbind(1)
    assert abs(float(rows.float().mean()) - 47.5) < 0.1
    assert abs(float(columns.float().mean()) - 199.5) < 0.1
    assert abs(len(rows) - np.pi * (0.95 * 30) ** 2) < 40
    owner = painter.owners(spec, (3, 8))[0]
    assert owner[1, 6] == 0
    assert (owner[:, :4] == -1).all()


def test_a_smoke_run_trains_stops_and_goes_on(words: Path, tmp_path: Path) -> None:
    common = ["--smoke", "--rows", "400", "--words", str(words), "--steps", "3", "--time-s", "60"]
    train.main([str(tmp_path / "a"), *common])
    train.main([str(tmp_path / "b"), *common, "--resume", str(tmp_path / "a")])
    assert json.loads((tmp_path / "b" / "state.json").read_text()) == {"steps": 6}
    for name in ("average", "first", "second"):
        (tmp_path / "b" / f"state_{name}.safetensors").unlink()
    train.main([str(tmp_path / "c"), *common, "--resume", str(tmp_path / "b"), "--new-positions"])
    assert json.loads((tmp_path / "c" / "state.json").read_text()) == {"steps": 9}
    AuraStage.load(Checkpoint.find(str(tmp_path / "b" / "checkpoint")), device=CPU, dtype=torch.float32)


def test_the_tower_is_taught_where_the_thing_of_a_cell_is(words: Path) -> None:
    maker = CaseMaker(words, ALBUM, seed=3, case=Case(1, BIG))
    batch = maker.batch(Plan(256, 144), rows=2000, vary=False)
    pictures = Feeder(Painter(PHOTOS, CPU)).inputs(batch).pictures
    assert pictures is not None
    (sight,) = batch.sights
    cells = pictures.cells.unflatten(1, (len(sight.group_frames), -1))
    thing = batch.spec.slots[sight.group_frames[:, 1], 2]
    there = cells[2] > 0
    for row, column, side in ((5, draw.X, 256), (6, draw.Y, 144)):
        third = torch.from_numpy(1 + (thing[:, column] > 0.4 * side).astype(int) + (thing[:, column] > 0.6 * side))
        assert (cells[row] == torch.where(there, third[:, None], 0)).all()
    assert (cells[7] == 3 * there).all()
    assert there.any(1).all()


def test_positions_can_be_read_from_an_untrained_tower_beside_the_pictures(words: Path) -> None:
    made = network(1, SMOKE)
    feeder, maker = Feeder(Painter(PHOTOS, CPU)), CaseMaker(words, ALBUM, seed=3, case=Case(1))
    faint, loud_read = positions_read(made, feeder, maker, rows=3000)
    with torch.no_grad():
        made.visual.pos_embed.weight.normal_(0, 0.02)
    fainter, faint_read = positions_read(made, feeder, maker, rows=3000)
    assert faint > 0.1 > 0.05 > fainter
    assert min(loud_read) > 0.15 + max(faint_read)


def test_positions_started_anew_keep_the_rest_and_their_moments_go(words: Path) -> None:
    trainer = train.Trainer(CPU, SMOKE, seed=1, rate=1e-3)
    maker = CaseMaker(words, ALBUM, seed=3, case=Case(1))
    trainer.step(Feeder(Painter(PHOTOS, CPU)).inputs(maker.batch(Plan(96, 64), rows=300)), 0.0)
    weight = trainer.made.visual.pos_embed.weight
    before = {name: value.detach().clone() for name, value in trainer.made.named_parameters()}
    assert weight in trainer.optimizer.state
    trainer.new_positions()
    assert weight not in trainer.optimizer.state
    changed = {name for name, value in trainer.made.named_parameters() if not torch.equal(value, before[name])}
    assert changed == {"visual.pos_embed.weight"}
    assert float(weight.detach().square().mean().sqrt()) == pytest.approx(POSITIONS, rel=1e-3)
    torch.testing.assert_close(trainer.average.visual.pos_embed.weight, weight.detach())


def test_what_a_step_is_made_of_is_measured(words: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    films = np.array([[0, 2]])
    np.savez(tmp_path / "photos.npz", train=PHOTOS, train_films=films, unseen=PHOTOS, unseen_films=films)
    common = ["--words", str(words), "--photos", str(tmp_path / "photos.npz"), "--steps", "1"]
    speed.main([*common, "--rows", "1600", "--run-s", "0.1", "--workers", "0"], sizes=SMOKE)
    assert "  1600 rows  make " in capsys.readouterr().out
