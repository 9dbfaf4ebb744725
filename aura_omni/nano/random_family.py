"""Writes a complete family of checkpoints with random weights: asr, aura, tts_base, tts_custom_voice, tts_voice_design.

Real file layout, real code paths, meaningless words. The tiny family serves tests and the first start; the true-size
family serves benchmarks. The same seed gives the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor, nn

from aura_omni.models.codec import DECODER_LAYOUT, CodecConfig, CodecDecoder
from aura_omni.models.codec_encoder import ENCODER_LAYOUT, CodecEncoder, CodecEncoderConfig
from aura_omni.models.qwen3_asr import AsrConfig, Qwen3Asr
from aura_omni.models.qwen3_tts import TALKER_LAYOUT, Talker, TalkerConfig
from aura_omni.models.qwen3_vl import LAYOUT as VL_LAYOUT
from aura_omni.models.qwen3_vl import Qwen3VL, VLConfig
from aura_omni.models.random_weights import RandomWeights
from aura_omni.models.speaker_encoder import SPEAKER_LAYOUT, SpeakerEncoder, SpeakerEncoderConfig
from aura_omni.models.weights import Layout, shapes_only, slots
from aura_omni.nano import published
from aura_omni.nano.published import TINY, Json, Sizes
from aura_omni.stages.tokenizer import QWEN_SPLIT

KINDS = ("base", "custom_voice", "voice_design")

# A vocabulary of a few hundred pieces is learned from this; what matters is that the role names become one token each.
_TEXTS = (
    "system", "user", "assistant", "language English", "language Chinese", "language None", " seconds",
    "what is the colour of the shape in front of me", "I see a red circle and a green square, and the blue one moves",
)  # fmt: skip
_SHARD_BYTES = 4 << 30


def write_family(
    folder: Path,
    *,
    sizes: Sizes = TINY,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    seed: int = 0,
    kinds: tuple[str, ...] = KINDS,
    weights: bool = True,
) -> None:
    """Write asr, aura and tts_KIND for each of kinds below `folder` (made if missing). True size: about 36 GB in bfloat16.

    weights: False leaves them out, for `load_format: dummy`.
    """
    device = device or torch.device("cpu")
    vocabulary = 151936 if sizes is not TINY else 512
    write = _Writer(dtype, device, seed, weights)
    with shapes_only():
        ids = write_tokenizer(folder / "asr", published.AUDIO_TOKENS)
        files = published.asr_files(sizes, ids, vocabulary)
        hearing = AsrConfig.from_json(files["config.json"])
        write.checkpoint(folder / "asr", files, [(Qwen3Asr(hearing), hearing.layout)])

        ids = write_tokenizer(folder / "aura", published.AURA_TOKENS)
        files = published.aura_files(sizes, ids, vocabulary)
        write.checkpoint(folder / "aura", files, [(Qwen3VL(VLConfig.from_json(files["config.json"])), VL_LAYOUT)])

        for kind in kinds:
            home = folder / f"tts_{kind}"
            ids = write_tokenizer(home, published.AUDIO_TOKENS)
            files = published.tts_files(sizes, ids, vocabulary, kind=kind)
            config = files["config.json"]
            networks: list[tuple[nn.Module, Layout]] = [(Talker(TalkerConfig.from_json(config)), TALKER_LAYOUT)]
            if kind == "base":
                networks.append((SpeakerEncoder(SpeakerEncoderConfig.from_json(config)), SPEAKER_LAYOUT))
            write.checkpoint(home, files, networks)
            codec = published.speech_tokenizer_files(sizes)
            decoder = CodecDecoder(CodecConfig.from_json(codec["config.json"]))
            encoder = CodecEncoder(CodecEncoderConfig.from_json(codec["config.json"]))
            _Writer(torch.float32, device, seed, weights).checkpoint(
                home / "speech_tokenizer",
                codec,
                [(decoder, DECODER_LAYOUT), (encoder, ENCODER_LAYOUT)],
                unused=published.speech_tokenizer_unused(sizes),
            )


class _Writer:
    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int, weights: bool = True) -> None:
        self._random, self._weights = RandomWeights(dtype=dtype, device=device, seed=seed), weights

    def checkpoint(
        self,
        folder: Path,
        files: Mapping[str, Json],
        networks: list[tuple[nn.Module, Layout]],
        *,
        unused: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        """unused: tensors that published files have and no network reads, name -> shape."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name).write_text(json.dumps(content, indent=1), encoding="utf-8")
        if not self._weights:
            return
        shards = list(self._shards(networks, unused or {}))
        if len(shards) == 1:
            save_file(shards[0], folder / "model.safetensors", {"format": "pt"})
            return
        index: dict[str, str] = {}
        for number, shard in enumerate(shards, 1):
            name = f"model-{number:05}-of-{len(shards):05}.safetensors"
            save_file(shard, folder / name, {"format": "pt"})
            index |= dict.fromkeys(shard, name)
        content = {
            "metadata": {"total_size": sum(t.nbytes for shard in shards for t in shard.values())},
            "weight_map": index,
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps(content), encoding="utf-8")

    def _shards(
        self, networks: list[tuple[nn.Module, Layout]], unused: Mapping[str, tuple[int, ...]]
    ) -> Iterator[dict[str, Tensor]]:
        shard: dict[str, Tensor] = {}
        size = 0
        for name, value in self._tensors(networks, unused):
            if size + value.nbytes > _SHARD_BYTES:
                yield shard
                shard, size = {}, 0
            shard[name] = value
            size += value.nbytes
        yield shard

    def _tensors(
        self, networks: list[tuple[nn.Module, Layout]], unused: Mapping[str, tuple[int, ...]]
    ) -> Iterator[tuple[str, Tensor]]:
        for network, layout in networks:
            state = network.state_dict()
            for slot in slots(network, layout):
                target = state[slot.ours]
                yield (
                    slot.published,
                    self._random.value(slot.published, torch.Size(slot.shape(target)), target.dtype).cpu(),
                )
        for name, dimensions in unused.items():
            yield name, self._random.value(name, torch.Size(dimensions), torch.float32).cpu()


def write_tokenizer(
    folder: Path, added: tuple[str, ...], *, texts: Iterable[str] = _TEXTS * 4, pieces: int = 400
) -> dict[str, int]:
    """tokenizer.json and tokenizer_config.json, of `pieces` byte pairs learnt from texts, and the added tokens.

    Returns the id of every added token and of "assistant".
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=pieces, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    names = (*published.CONTROL_TOKENS, *published.PLAIN_ADDED_TOKENS, *added)
    special = {*published.CONTROL_TOKENS, *published.AUDIO_TOKENS} - {"<asr_text>"}  # which must outlive decoding
    tokenizer.add_tokens([AddedToken(name, normalized=False, special=name in special) for name in names])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer.model.save(str(folder))  # vocab.json and merges.txt: all that some published folders have
    config = published.tokenizer_config(
        {token.content: number for number, token in tokenizer.get_added_tokens_decoder().items()}, special
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    found = {name: tokenizer.token_to_id(name) for name in (*names, "assistant")}
    return {name: number for name, number in found.items() if number is not None}
