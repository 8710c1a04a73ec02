"""Classification of token sequences, and a small transformer for it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from posterity_lab.data import Split

WORDS, LENGTH = 8, 16
WRONG = 0.02


def majority(examples: int, seed: int) -> Split:
    """Sequences of random tokens; the label says which of the tokens 0 and 1 is more frequent.

    Sequences in which both are equally frequent are left out. A share ``WRONG`` of the labels is wrong, in
    training and test: without wrong labels, a net that has found the rule could not be overconfident.

    Args:
        examples: Number of sequences.
        seed: Seed of tokens and wrong labels.

    Example:
        >>> data = majority(1000, seed=0)
        >>> zeros, ones = ((data.x == token).sum(1) for token in (0, 1))
        >>> int(((ones > zeros) == (data.y == 1)).sum())
        983
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, WORDS, (3 * examples + 100, LENGTH), generator=generator)
    lead = (drawn == 1).sum(1) - (drawn == 0).sum(1)
    rows = lead.nonzero().flatten()[:examples]
    wrong = torch.rand(len(rows), generator=generator) < WRONG
    return Split(drawn[rows], ((lead[rows] > 0) ^ wrong).long())


class Transformer(nn.Module):
    """Token and position embeddings, two encoder layers, a linear layer on the mean over positions.

    Example:
        >>> Transformer()(torch.zeros(3, 16, dtype=torch.long)).shape
        torch.Size([3, 2])
    """

    def __init__(self) -> None:
        super().__init__()
        width = 32
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 2)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of the two classes."""
        places = torch.arange(ids.shape[1], device=ids.device)
        out: Tensor = self.head(self.encoder(self.words(ids) + self.places(places)).mean(1))
        return out
