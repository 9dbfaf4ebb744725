"""Writes a checkpoint folder that the server loads: a Talker of CustomVoice or Base with its codec, in the published layout.

    python -m training.tts.export --talker talker.pt --wave wave.pt --tokenizer tokenizer.json --out DIR/tts_custom_voice
    python -m training.tts.export .. --encoder encoder.pt --kind base --out DIR/tts_base

One Talker serves both kinds. Weights are float16. Without --encoder the codec's encoder is zero, so that the file is complete;
speaking with the built-in voices never runs it.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from pathlib import Path

import torch
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


def write(folder: Path, files: Mapping[str, Json], tensors: Mapping[str, Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
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
    files = shape.talker_files(shape.ids_of(tokenizer), tokenizer.get_vocab_size(), kind=kind)
    tensors = to_published(talker.talker, TALKER_LAYOUT)
    if kind == "base":
        if encoder is None:
            raise ValueError("a base checkpoint needs a trained encoder")
        tensors |= to_published(encoder.speaker, SPEAKER_LAYOUT)
    write(out, files, tensors)
    codec_tensors = encoder_tensors(encoder) | to_published(decoder_of(codec), DECODER_LAYOUT)
    write(out / "speech_tokenizer", shape.codec_files(), codec_tensors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--talker", type=Path, required=True)
    parser.add_argument("--wave", type=Path, required=True)
    parser.add_argument("--encoder", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--kind", choices=("custom_voice", "base"), default="custom_voice")
    parser.add_argument("--out", type=Path, required=True)
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
    for file in sorted(given.out.rglob("*")):
        if file.is_file():
            print(f"{file.stat().st_size / 1e6:8.2f} MB  {file.relative_to(given.out)}")


if __name__ == "__main__":
    main()
