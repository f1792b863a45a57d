"""Tell from a character's name (GREEK SMALL LETTER ALPHA) what it is (Ll), with a small transformer.

The data come with Python: about 10,000 names of 1 to 16 words, and the categories, are in unicodedata.
"""

import argparse
import unicodedata

import torch
from torch import nn

import evenstep
from evenstep import weights_sha256

PADDING, UNKNOWN, MAX_WORDS = 0, 1, 20


class Reader(nn.Module):
    def __init__(self, num_words, num_kinds, width=64):
        super().__init__()
        self.words = nn.Embedding(num_words, width, padding_idx=PADDING)
        self.places = nn.Parameter(0.1 * torch.randn(MAX_WORDS, width))
        layer = nn.TransformerEncoderLayer(width, 4, dim_feedforward=128, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, num_kinds)

    def forward(self, words):
        is_padding = words == PADDING
        inner = self.words(words) + self.places[: words.shape[1]]
        inner = self.encoder(inner, src_key_padding_mask=is_padding)
        inner = inner.masked_fill(is_padding[..., None], 0)
        return self.head(inner.sum(1) / (~is_padding).sum(1, keepdim=True))


def read_names():
    """Return training rows, test rows (words, kind), how many words and how many kinds there are."""
    characters = [chr(code) for code in range(0x3000) if unicodedata.name(chr(code), "")]
    rows = [(unicodedata.name(c).split()[:MAX_WORDS], unicodedata.category(c)) for c in characters]
    number_of_kind = {kind: number for number, kind in enumerate(sorted({kind for _, kind in rows}))}
    seen = sorted({word for i, (words, _) in enumerate(rows) if i % 5 for word in words})
    number_of_word = {word: number for number, word in enumerate(seen, start=UNKNOWN + 1)}
    numbers = [
        (torch.tensor([number_of_word.get(word, UNKNOWN) for word in words]), number_of_kind[kind])
        for words, kind in rows
    ]
    train, test = [row for i, row in enumerate(numbers) if i % 5], numbers[::5]
    return train, test, len(seen) + 2, len(number_of_kind)


def collate(rows):
    words = nn.utils.rnn.pad_sequence([words for words, _ in rows], batch_first=True, padding_value=PADDING)
    return words, torch.tensor([kind for _, kind in rows])


def loss(model, batch):
    words, kinds = batch
    return nn.functional.cross_entropy(model(words), kinds)


def main(world, args):
    torch.manual_seed(0)
    train_set, test_set, num_words, num_kinds = read_names()
    model = Reader(num_words, num_kinds)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)
    state = evenstep.TrainState(model, optimizer)
    train = evenstep.Loader(train_set, batch_size=64, collate_fn=collate)
    for batch in train.batches(state, steps=args.steps):
        evenstep.train_step(state, batch, loss)
    model.eval()
    words, kinds = collate(test_set)
    with torch.no_grad():
        accuracy = (model(words).argmax(1) == kinds).float().mean().item()
    return accuracy, weights_sha256(model.state_dict())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--nproc", type=int, default=2)
    args = parser.parse_args()
    accuracy, digest = evenstep.launch(main, args, nproc=args.nproc, lanes=4)
    print(f"accuracy {accuracy:.3f}, weights {digest[:16]}")
