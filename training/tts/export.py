"""Writes a checkpoint folder that the server loads: a Talker of CustomVoice or Base with its codec, in the published layout.

    python -m training.tts.export --talker talker.pt --wave wave.pt --tokenizer tokenizer.json --out DIR/tts_custom_voice
    python -m training.tts.export .. --encoder encoder.pt --kind base --out DIR/tts_base
    python -m training.tts.export .. --encoder encoder.pt --out DIR/tts --share DIR/tts-base    # both, with the weights once

One Talker serves both kinds, so a Base checkpoint may consist of its speaker encoder and of indexes that name the other's files. Weights are float16. Without --encoder the codec's encoder is zero, so that the file is complete;
speaking with the built-in voices never runs it.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from aura_omni.models.codec import DECODER_LAYOUT, CodecDecoder
from aura_omni.models.codec_encoder import ENCODER_LAYOUT
from aura_omni.models.qwen3_tts import TALKER_LAYOUT
from aura_omni.models.speaker_encoder import SPEAKER_LAYOUT
from aura_omni.models.weights import to_published
from aura_omni.nano import published
from aura_omni.nano.published import Json
from training.tts import clock, shape
from training.tts.codec_model import TrainedCodec
from training.tts.talker_model import TrainedTalker
from training.tts.train_encoder import TrainedEncoder


@torch.no_grad()
def decoder_of(model: TrainedCodec) -> CodecDecoder:
    """The product's decoder with the tables of the training model as its books."""
    decoder = model.decoder
    first, rest = decoder.quantizer.rvq_first, decoder.quantizer.rvq_rest
    first.output_proj.weight.copy_(model.first.weight[..., None])
    rest.output_proj.weight.copy_(model.rest.weight[..., None])
    table0, more = model.tables()
    tables = [table0, *more]
    books = [layer["_codebook"] for part in (first, rest) for layer in part.vq["layers"]]
    for number, book in enumerate(books):
        book.cluster_usage.fill_(1.0)
        book.embedding_sum.zero_()
        if number < len(tables):
            book.embedding_sum[: len(tables[number])].copy_(tables[number])
    return decoder


def encoder_tensors(encoder: TrainedEncoder | None) -> dict[str, Tensor]:
    """With the tensors that no network reads. Without a trained encoder zero everywhere, which speaking never reads."""
    made = shape.codec()[1] if encoder is None else encoder.encoder
    if encoder is not None:
        encoder.fill_books()
    tensors = to_published(made, ENCODER_LAYOUT)
    if encoder is None:
        tensors = {name: torch.zeros_like(value) for name, value in tensors.items()}
    tensors |= {
        name: torch.zeros(size)
        for name, size in published.speech_tokenizer_unused(shape.SIZES).items()
        if not re.search(r"layers\.(1[5-9]|[2-9]\d)\.", name)  # of books beyond the 16 that this encoder has
    }
    for name, value in tensors.items():
        if name.endswith(("cluster_usage", "initialized")):
            value.fill_(1)
    return tensors


def write_json(folder: Path, files: Mapping[str, Json]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def write(folder: Path, files: Mapping[str, Json], tensors: Mapping[str, Tensor]) -> None:
    write_json(folder, files)
    halves = {name: value.half() if value.is_floating_point() else value for name, value in tensors.items()}
    wrong = [name for name, value in halves.items() if not value.float().isfinite().all()]
    if wrong:
        raise ValueError(f"not finite in float16: {', '.join(wrong)}")
    save_file(halves, folder / "model.safetensors", {"format": "pt"})


def write_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    added = tokenizer.get_added_tokens_decoder()
    config = published.tokenizer_config(
        {token.content: number for number, token in added.items()},
        [token.content for token in added.values() if token.special],
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def talker_files(tokenizer: Tokenizer, kind: str) -> dict[str, Json]:
    ids, vocabulary = shape.ids_of(tokenizer), tokenizer.get_vocab_size()
    return shape.talker_files(ids, vocabulary, kind=kind, codec_ids=shape.PUBLISHED_CODEC_IDS)


def padded(talker: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """With as many codec ids as are published; those behind the trained ones are zero, and never drawn."""
    more = shape.PUBLISHED_CODEC_IDS - shape.CODEC_IDS
    of_ids = ("talker.model.codec_embedding.weight", "talker.codec_head.weight")
    return {name: F.pad(value, (0, 0, 0, more)) if name in of_ids else value for name, value in talker.items()}


def export(
    out: Path,
    tokenizer: Tokenizer,
    talker: TrainedTalker,
    codec: TrainedCodec,
    encoder: TrainedEncoder | None,
    *,
    kind: str,
) -> None:
    """kind: "custom_voice", or "base", which needs an encoder. talker is folded by this."""
    talker.fold()
    write_tokenizer(out, tokenizer)
    files = talker_files(tokenizer, kind)
    tensors = padded(to_published(talker.talker, TALKER_LAYOUT))
    if kind == "base":
        if encoder is None:
            raise ValueError("a base checkpoint needs a trained encoder")
        tensors |= to_published(encoder.speaker, SPEAKER_LAYOUT)
    write(out, files, tensors)
    codec_tensors = encoder_tensors(encoder) | to_published(decoder_of(codec), DECODER_LAYOUT)
    write(out / "speech_tokenizer", shape.codec_files(), codec_tensors)


def share(whole: Path, base: Path, tokenizer: Tokenizer, encoder: TrainedEncoder) -> None:
    """Into `base`, beside the CustomVoice checkpoint `whole`: the speaker encoder, and indexes for all that is in `whole`."""
    write_tokenizer(base, tokenizer)
    files = talker_files(tokenizer, "base")
    write(base, files, to_published(encoder.speaker, SPEAKER_LAYOUT))
    (base / "model.safetensors").rename(base / "speaker_encoder.safetensors")
    write_json(base / "speech_tokenizer", shape.codec_files())
    up = f"../{whole.name}/"
    own = dict.fromkeys(_names(base / "speaker_encoder.safetensors"), "speaker_encoder.safetensors")
    talker = dict.fromkeys(_names(whole / "model.safetensors"), up + "model.safetensors")
    codec_file = "speech_tokenizer/model.safetensors"
    codec = dict.fromkeys(_names(whole / codec_file), "../" + up + codec_file)
    for folder, where in ((base, own | talker), (base / "speech_tokenizer", codec)):
        write_json(folder, {"model.safetensors.index.json": {"metadata": {}, "weight_map": where}})


def _names(file: Path) -> list[str]:
    with safe_open(file, framework="pt") as tensors:
        return sorted(tensors.keys())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--talker", type=Path, required=True)
    parser.add_argument("--wave", type=Path, required=True)
    parser.add_argument("--encoder", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--kind", choices=("custom_voice", "base"), default="custom_voice")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--share", type=Path, help="of a Base checkpoint that shares the weights of --out, in a folder beside it"
    )
    given = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(given.tokenizer))
    talker, codec = TrainedTalker(tokenizer.get_vocab_size()), TrainedCodec()
    talker.load_state_dict(clock.load(given.talker)["model"])
    codec.load_state_dict(clock.load(given.wave)["model"])
    encoder = None
    if given.encoder:
        encoder = TrainedEncoder()
        encoder.load_state_dict(clock.load(given.encoder)["model"])
    export(given.out, tokenizer, talker, codec, encoder, kind=given.kind)
    if given.share:
        if encoder is None or given.share.resolve().parent != given.out.resolve().parent:
            parser.error("--share takes a folder beside --out, and needs --encoder")
        share(given.out, given.share, tokenizer, encoder)
    for file in sorted(given.out.rglob("*")):
        if file.is_file():
            print(f"{file.stat().st_size / 1e6:8.2f} MB  {file.relative_to(given.out)}")


if __name__ == "__main__":
    main()
