"""The acoustic codes that a Talker would choose on clips whose phones and past it is given: what the vocoder must cope with.

    python -m training.tts.predict --corpus many.npz --codes many_codes.npz --tokenizer tokenizer.json --talker talker.pt --out predicted.npz

They are in step with the true sound, so that `train_wave --predicted` can learn from them. Use a Talker whose code predictor
does not know the clips by heart (`train_books`).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from training.tts import clock, shape
from training.tts.corpus import Corpus
from training.tts.listen import talker_of
from training.tts.talker_batch import Rows
from training.tts.talker_model import TrainedTalker
from training.tts.train_books import heard_by

_BLOCK = 1_024


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--codes", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--talker", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--temperature", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.manual_seed(given.seed)
    corpus = Corpus.of_arrays(dict(np.load(given.corpus)), "sound_")
    true = np.load(given.codes)["codes"].astype(np.int64)
    codes = torch.from_numpy(np.concatenate((corpus.codes.astype(np.int64)[:, None], true), 1))
    tokenizer = Tokenizer.from_file(str(given.tokenizer))
    model = TrainedTalker(tokenizer.get_vocab_size())
    model.load_state_dict(clock.load(given.talker)["model"])
    numbers, random = np.arange(len(corpus)), np.random.default_rng(given.seed)
    hidden, frames = heard_by(model.eval(), Rows(tokenizer), corpus, codes, numbers, random)
    talker = talker_of(given.talker, tokenizer).talker

    def choose(logits: Tensor, group: int) -> Tensor:
        if group > shape.ACOUSTIC_BOOKS:
            return torch.zeros(len(logits), dtype=torch.int64)
        if given.temperature <= 0:
            return logits.argmax(-1)
        return (logits / given.temperature - torch.empty_like(logits).exponential_().log()).argmax(-1)

    made = true.copy()
    for some, at in zip(hidden.split(_BLOCK), frames.split(_BLOCK), strict=True):
        chosen, _ = talker.frame(some.float(), codes[at, 0], choose)
        made[at.numpy()] = chosen[:, 1 : 1 + shape.ACOUSTIC_BOOKS].numpy()
    np.savez_compressed(given.out, codes=made.astype(np.uint8))
    print("equal to the true codes, by book:", (made == true).mean(0).round(3).tolist())


if __name__ == "__main__":
    main()
